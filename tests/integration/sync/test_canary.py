"""A canary of an engine on a GPU: it shows small faults of weights, and no order of additions.

No GPU: an engine on the CPU says that it is one, and its logits are moved by hand.
"""

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.config import HFEngineConfig, TrainingError
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.remote.fleet import common_caps
from onepolicy.sync import canary
from onepolicy.sync.canary import inexact_dtype, last_place
from onepolicy.sync.push import checked_push
from support.fake_learner import FakeLearner
from support.models import VOCAB, make


@pytest.fixture
def engine():
    config = HFEngineConfig(dtype="bfloat16", max_num_seqs=4)
    engine = HFEngine(make("qwen3_moe"), config, return_routes=True, max_len=64)
    engine.caps = dataclasses.replace(engine.caps, inexact_dtype="bfloat16")
    return engine


def after_the_push(engine, change, forwards):
    """Let `change` move the largest logit of the first `forwards` forwards after a push."""
    left = [0]
    load = engine.load_weights

    async def loading(weights, version):
        await load(weights, version)
        left[0] = forwards

    def moved(module, inputs, logits):
        if left[0] <= 0:
            return None
        left[0] -= 1
        top = logits.argmax(-1, keepdim=True)
        return logits.scatter(-1, top, change(logits.gather(-1, top)))

    engine.load_weights = loading
    engine.model.lm_head.register_forward_hook(moved)


def push(engine):
    asyncio.run(checked_push(FakeLearner(make("qwen3_moe")), engine, vocab=VOCAB))


def next_number(logit):
    return torch.nextafter(logit, torch.tensor(float("inf"), dtype=logit.dtype))


def test_a_fault_of_three_hundredths_is_seen_where_logits_are_small(engine):
    after_the_push(engine, lambda logit: logit + 0.04, forwards=1000)
    with pytest.raises(TrainingError, match=r"by up to 0\.0[34]"):
        push(engine)


@pytest.mark.parametrize("forwards", [1, 4, 1000])
def test_a_last_place_is_not_a_fault(engine, forwards):
    """Of one forward, of the first canary, of all."""
    after_the_push(engine, next_number, forwards)
    push(engine)


def test_a_rare_order_of_additions_does_not_come_back(engine):
    """In deep layers it may move more than places of a logit: the canary is asked again."""
    after_the_push(engine, lambda logit: logit + 0.3, forwards=1)
    push(engine)


def test_on_a_cpu_no_difference_is_allowed(engine):
    engine.caps = dataclasses.replace(engine.caps, inexact_dtype=None)
    after_the_push(engine, next_number, forwards=1)
    with pytest.raises(TrainingError, match="moved the log-probabilities"):
        push(engine)


def test_engines_on_a_gpu_are_inexact():
    assert inexact_dtype("bfloat16", cpu=True) is None
    assert inexact_dtype("bfloat16", cpu=False) == "bfloat16"


def test_last_places_are_those_of_the_number():
    numbers = torch.tensor([0.5, 1.0, 3.0, 8.5, 20.0])
    assert last_place(numbers, "bfloat16").tolist() == [2**-8, 2**-7, 2**-6, 2**-4, 2**-3]
    exact = numbers.bfloat16()  # all of them
    assert torch.equal((next_number(exact) - exact).float(), last_place(numbers, "bfloat16"))
    assert torch.equal(next_number(numbers) - numbers, last_place(numbers, "float32"))


def test_a_large_logit_has_large_places(engine):
    """A likely token of a large vocabulary has a large logit: log(150,000) = 11.9 above an even
    choice, where a last place of bfloat16 is 1/16."""
    likely = torch.tensor([-0.1, -11.5])
    allowed = canary.allowed_change(engine, likely, 0.0, 150_000)
    assert torch.equal(allowed, 2 * torch.tensor([2**-4, 2**-8]))
    noisy = canary.allowed_change(engine, likely, 0.5, 150_000)
    assert torch.equal(noisy, allowed + 2)


def test_a_fleet_is_as_inexact_as_its_worst_engine(engine):
    exact = dataclasses.replace(engine.caps, inexact_dtype=None)
    assert common_caps([exact, engine.caps]).inexact_dtype == "bfloat16"
    assert common_caps([exact, exact]).inexact_dtype is None
