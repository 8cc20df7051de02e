"""vLLM computes with adapters that are loaded by name, and a fault of their sync is named."""

import asyncio
from itertools import product

import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.cli import main
from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.models.load import load_model
from onepolicy.rollout.vllm.adapter import lora_args, server_args
from onepolicy.train.checkpoint import checkpoint_folder
from onepolicy.types import Sampling
from support.adapter_faults import (
    FAULTS,
    ON_TOP,
    POLICY,
    SYNCS,
    VLLM,
    entries_there,
    first_seen,
    planted,
    settings,
)
from support.small_recipe import write_recipe
from support.vllm_engines import make_checkpoints

pytestmark = pytest.mark.vllm
QUIET = (
    "eval = { every = 0 }",
    "log = { counterfactual_every = 0, tensorboard = false, report = false }",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("models"))[0]


def built(folder, sync="native", dtype="float32"):
    return build_components(settings(folder, "vllm", sync, dtype, **VLLM))[0]


def test_an_adapter_is_loaded_anew_after_every_update(checkpoint):
    """And one that requests do not name is named at once, by what vLLM itself reports."""
    components = built(checkpoint)
    assert asyncio.run(first_seen(components, None)) == (None, "")
    engine = components.engine
    assert engine.loaded.request.lora_name == "lora-faults@3"
    assert engine.llm.list_loras() == {engine.loaded.request.lora_int_id}
    step, message = asyncio.run(first_seen(built(checkpoint), "never named"))
    assert step == 1
    assert "was given the adapter 'lora-faults', but a reply names None" in message


def test_a_saved_checkpoint_is_an_adapter_that_vllm_loads(checkpoint, tmp_path):
    """From the folder of the checkpoint as it is."""
    from vllm.lora.request import LoRARequest

    recipe = write_recipe(checkpoint, "steps = 2", "train = { threads = 1 }", *QUIET)
    lora = ["train.lora.rank=4", 'train.lora.targets=["attention"]', "optim.lr=1e-2"]
    out = tmp_path / "run"
    moved = "objective.entropy_coef=0.3"  # random weights earn nothing; this moves the adapter
    assert main(["train", str(recipe), f"out={out}", moved, *lora]) == 0
    folder = str(checkpoint_folder(out, 2))
    engine = built(checkpoint).engine
    engine.loaded.request = LoRARequest(lora_name="saved@2", lora_int_id=7, lora_path=folder)
    cpu = torch.device("cpu")
    merged = load_model(ModelConfig(path=folder), torch.float32, cpu)
    base = load_model(ModelConfig(path=str(checkpoint)), torch.float32, cpu)
    for prompt in ([5, 9, 3, 20], [7, 8, 4], [12, 6, 3, 3, 9]):
        done = asyncio.run(engine.generate(prompt, Sampling(0.0, 12), seed=0))
        assert done.adapter == "saved"
        torch.testing.assert_close(done.logp, scored(merged, prompt, done), atol=1e-4, rtol=0)
        assert (done.logp - scored(base, prompt, done)).abs().max() > 1e-2


@torch.no_grad()
def scored(model, prompt, done):
    """Return the model's log-probabilities [n] of a completion's tokens."""
    ids = done.token_ids.long()
    logits = model(input_ids=torch.tensor([[*prompt, *ids.tolist()]]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(-1, ids[:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "dtype", "words"),
    [
        ("merged twice", "float32", "the adapter added twice"),
        ("merged twice", "bfloat16", "of what it changes in the trainer's"),
        (ON_TOP, "float32", "weights that hold that of the version"),
    ],
)
def test_a_second_merge_that_goes_wrong_is_named_at_once(policy, fault, dtype, words):
    step, message = asyncio.run(first_seen(built(policy, "merged", dtype), fault, since=2))
    assert step == 2
    assert words in message


def test_what_vllm_cannot_compute_with_is_refused(checkpoint):
    model = ModelConfig(path=str(checkpoint))
    with pytest.raises(UsageError, match="adapters of experts are not what vLLM computes with"):
        lora_args(LoraConfig(sync="native"), model)
    with pytest.raises(UsageError, match=r"1000 is more than vLLM's largest"):
        lora_args(LoraConfig(sync="native", rank=1000, targets=("attention",)), model)
    found = lora_args(LoraConfig(sync="native", rank=20, targets=("attention",)), model)
    assert found["max_lora_rank"] == 32
    assert found["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert server_args(20, model) == found
    with pytest.raises(UsageError, match=r"lora_rank: 1000 is more than vLLM's largest"):
        server_args(1000, model)


@pytest.mark.slow
def test_the_table_of_planted_failures(subtests):
    for sync, fault in product(SYNCS, FAULTS):
        with subtests.test(fault, sync=sync):
            found = planted(POLICY, "vllm", sync, fault, **VLLM)
            assert {step for step, _ in found["named"]} == {0}
            assert found in entries_there()
