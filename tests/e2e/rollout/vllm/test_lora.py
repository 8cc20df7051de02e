"""vLLM computes with adapters that are loaded by name, and a fault of their sync is named."""

import asyncio

import pytest

from onepolicy.build.components import build_components
from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.rollout.vllm.adapter import lora_args, server_args
from support.adapter_faults import (
    FAULTS,
    ON_TOP,
    POLICY,
    SYNCS,
    VLLM,
    entries_there,
    first_seen,
    planted,
    seen_by,
    settings,
)
from support.vllm_engines import make_checkpoints

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("models"))[0]


def test_an_adapter_is_loaded_anew_after_every_update(checkpoint):
    components, _ = build_components(settings(checkpoint, "vllm", "native", "float32", **VLLM))
    assert asyncio.run(first_seen(components, None)) == (None, "")
    engine = components.engine
    assert engine.loaded.request.lora_name == "lora-faults@3"
    assert engine.llm.list_loras() == {engine.loaded.request.lora_int_id}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("merged twice", "the adapter added twice"),
        (ON_TOP, "weights that hold that of the version"),
    ],
)
def test_a_second_merge_that_goes_wrong_is_named_at_once(policy, fault, words):
    components, _ = build_components(settings(policy, "vllm", "merged", "float32", **VLLM))
    step, message = asyncio.run(first_seen(components, fault, since=2))
    assert step == 2
    assert words in message


@pytest.mark.slow
def test_a_second_merge_of_twice_the_adapter_is_named_at_once_in_bfloat16(policy):
    components, _ = build_components(settings(policy, "vllm", "merged", **VLLM))
    step, message = asyncio.run(first_seen(components, "merged twice", since=2))
    assert (step, seen_by(message)) == (2, "log-probabilities")


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
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_table_of_planted_failures(sync, fault):
    found = planted(POLICY, "vllm", sync, fault, **VLLM)
    assert {step for step, _ in found["named"]} == {0}
    assert found in entries_there()
