"""vLLM's own sets (`sampling_mask`, vLLM 0.30.0, Model Runner V2).

By contract: Model Runner V2 needs a Triton backend that no CPU has, so no engine here returns them.
The fields are those of the installed package; a server in miniature returns them.
"""

import dataclasses
import inspect

import pytest
import torch

from onepolicy.config import TrainingError, UsageError
from onepolicy.rollout.remote.dialects.vllm_replies import top_and_support
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Sampling
from support.fake_vllm import connected, edited, one, serving

GENERATE = "/inference/v1/generate"
ASKED = {"top_k": 3, "support": True}


@pytest.fixture
def fake(checkpoints):
    with serving(checkpoints) as served:
        served.masks = True
        yield served


def spoiled(fake, sets):
    """Change the sets of every reply: list of ids of every token -> the same."""

    def spoil(reply, number):
        return edited(reply, sampling_mask=sets(reply["choices"][0]["sampling_mask"]))

    fake.spoil = {GENERATE: spoil}


def test_the_sets_of_both_sources_are_one(fake):
    both = one(connected(fake), **ASKED).support
    fake.masks = False
    assert one(connected(fake), **ASKED).support == both
    assert both.sizes.tolist() == [3] * 6


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (lambda sets: sets[1:], "sampling_mask: 5 sets for 6 tokens"),
        (lambda sets: [sets[-1], *sets[:-1]], "its sets are not the tokens with"),
        (lambda sets: [[], *sets[1:]], "sampling_mask: an empty set"),
    ],
    ids=["one is missing", "shifted", "empty"],
)
def test_other_sets_are_refused(fake, sets, words):
    engine = connected(fake, retries=0)
    spoiled(fake, sets)
    with pytest.raises(TrainingError, match=words):
        one(engine, **ASKED)


def test_a_server_of_few_log_probabilities_is_refused_with_its_option(fake):
    """vLLM's default is 20, of which the sampled token takes one; top_k 3 needs 22."""
    fake.told = {"max_logprobs": 20}
    with pytest.raises(UsageError, match=r"up to 22 .* at most 19; .* --max-logprobs 23"):
        one(connected(fake), **ASKED)


def test_the_mask_has_the_ties_that_a_list_cuts():
    """Five tokens tie at top_k = 2, of which a list of four has four."""
    logp = torch.full((1, 4), 0.2).log()
    listed, ids = Sampling(1.0, 1, **ASKED), torch.tensor([[0, 1, 2, 3]])
    with pytest.raises(UsageError, match="not the whole set"):
        top_and_support(ids, logp, listed)
    found = top_and_support(ids, logp, listed, [[4, 0, 1, 2, 3]])
    assert found["support"] == SupportTrace.from_sets([[0, 1, 2, 3, 4]])
    valued = dataclasses.replace(listed, support_logp=True)  # the mask has no values
    with pytest.raises(UsageError, match="not the whole set"):
        top_and_support(ids, logp, valued, [[4, 0, 1, 2, 3]])


@pytest.mark.vllm
def test_the_installed_vllm_has_these_fields():
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseChoice
    from vllm.outputs import CompletionOutput, SamplingMask

    assert vllm.__version__.startswith("0.30.0")
    assert "sampling_mask" in {field.name for field in dataclasses.fields(CompletionOutput)}
    assert list(inspect.signature(SamplingMask).parameters) == ["token_ids"]
    assert GenerateResponseChoice(index=0, sampling_mask=[[1, 2]]).sampling_mask == [[1, 2]]
    assert EngineArgs.return_sampling_mask is False
