"""Adapters in a model: their targets, base + adapter, files that peft loads, and gradients."""

import copy
import sys

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import linear

from onepolicy.build.components import check_adapters
from onepolicy.config import ModelConfig, UsageError, resolve
from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.models.experts import NAME
from onepolicy.models.load import load_model
from onepolicy.sync.adapters import add_adapter
from onepolicy.sync.push import SentTensors
from onepolicy.train.lora import Adapter, check_start
from support.lora_models import (
    EVERYTHING,
    adapted,
    check_gradients_by_hand,
    logits,
    saved,
    targets_of,
)
from support.models import CONFIGS, make
from support.replay_models import same_bits


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize("family", CONFIGS)
def test_base_and_adapters_of_every_family(family, subtests):
    model, base = adapted(family, targets_of(family)), make(family)
    on, off = logits(model), logits(base)
    assert not torch.equal(on, off)
    with subtests.test("off: the base"):
        with lora.adapters_off(model):
            assert torch.equal(logits(model), off)
            with lora.adapters_off(model):
                assert torch.equal(logits(model), off)
            assert torch.equal(logits(model), off)
            assert same_bits(dict(lora.merged_tensors(model)), base.state_dict())
        assert torch.equal(logits(model), on)
    with subtests.test("every difference is that of peft"):
        for layer in lora.adapted_layers(model).values():
            assert torch.equal(lora.delta(layer), layer.get_delta_weight(lora.ADAPTER))
    with subtests.test("base + adapter is the model"):
        base.load_state_dict(dict(SentTensors(model).cast(None)))
        torch.testing.assert_close(logits(base), on, rtol=1e-4, atol=1e-4)


def test_what_is_adapted_and_what_is_trained():
    found = set(lora.adapted_layers(adapted("deepseek_v3", EVERYTHING)))
    layers = {f"model.layers.{i}." for i in range(3)}
    assert {name for name in found if "shared_experts" in name}
    assert {f"{layer}self_attn.o_proj.weight" for layer in layers} <= found
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.2.mlp.gate.weight"} <= found
    assert "lm_head.weight" not in found
    model = adapted("qwen3_moe")
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert trained == {name for name in dict(model.named_parameters()) if ".lora_" in name}
    assert not any("mlp.gate." in name for name in trained)


def test_adapters_are_float32_in_a_bfloat16_model_and_merge_with_one_rounding():
    model = adapted(dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in lora.adapter_tensors(model).values()} == {torch.float32}
    base = make("qwen3_moe", dtype=torch.bfloat16).state_dict()
    sent = dict(SentTensors(model).cast("bfloat16"))
    for name, layer in lora.adapted_layers(model).items():
        assert torch.equal(sent[name], (base[name].float() + lora.delta(layer)).bfloat16())


@torch.no_grad()
@pytest.mark.parametrize("targets", [None, ("experts",), ("attention", "routers")])
def test_peft_loads_the_files(targets, tmp_path):
    model = saved(tmp_path, targets)
    loaded = PeftModel.from_pretrained(make("qwen3_moe"), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    assert lora.base_path(tmp_path / "adapter") == str(tmp_path / "base")


def test_an_adapter_is_refused_on_other_weights_scales_ranks_and_targets(tmp_path):
    adapter = Adapter(adapted(), "test")
    adapter.save(tmp_path)
    same = adapted(seed=3)
    Adapter(same, "test").load(tmp_path)
    assert torch.equal(logits(same), logits(adapter.model))
    other = make("qwen3_moe", seed=1)
    add_adapter(other, LoraConfig(rank=4), "base", 0)
    with pytest.raises(UsageError, match="its weights are not those that the adapter"):
        Adapter(other, "test").load(tmp_path)
    with pytest.raises(UsageError, match="use the rank"):
        Adapter(adapted(rank=8), "test").load(tmp_path)
    with pytest.raises(UsageError, match="use the targets"):
        Adapter(adapted(targets=("attention",)), "test").load(tmp_path)
    rescaled = make("qwen3_moe")
    add_adapter(rescaled, LoraConfig(rank=4, alpha=1), "base", 0)
    said = r"alpha / rank is 0.25, but .* was trained with 2; set train.lora.alpha = 8"
    with pytest.raises(UsageError, match=said):
        Adapter(rescaled, "test").load(tmp_path)
    check_start(tmp_path, LoraConfig())
    with pytest.raises(UsageError, match="trains all weights"):
        check_start(tmp_path, None)
    with pytest.raises(UsageError, match="holds a whole model"):
        check_start(tmp_path / "other", LoraConfig())


def test_a_target_that_the_model_lacks_is_refused():
    with pytest.raises(UsageError, match=r"train.lora.targets: experts, but Qwen3ForCausalLM has"):
        add_adapter(make("qwen3_dense"), LoraConfig(targets=("experts",)), "base", 0)
    add_adapter(make("qwen3_dense"), LoraConfig(), "base", 0)


def test_gradients_are_those_of_a_hand_made_loop():
    model = adapted(targets=("attention", "experts"))
    model.set_experts_implementation(NAME)
    check_gradients_by_hand(model, make("qwen3_moe").state_dict())


@torch.no_grad()
def test_contexts_leave_the_model_as_it_was():
    model = adapted(targets=EVERYTHING, family="deepseek_v3")
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    with lora.scaled_adapters(model, 2):
        twice = logits(model)
    with lora.trial_adapter(model, 1e-3, seed=0):
        assert {float(t.abs().max()) for n, t in lora.adapter_tensors(model).items() if "_B" in n}
    with lora.merged_in(model, torch.bfloat16, adapter=True):
        rounded = logits(model)
    with lora.merged_in(model, torch.float32, adapter=True):
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    with lora.merged_in(model, torch.float32, adapter=False), lora.adapters_off(model):
        torch.testing.assert_close(logits(model), logits(make("deepseek_v3")))
    assert not torch.equal(twice, before)
    assert not torch.equal(rounded, before)
    assert torch.equal(logits(model), before)
    assert same_bits(weights, model.state_dict())
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())


def test_an_adapter_folder_is_loaded_as_base_and_adapter_merged(tmp_path):
    merged = dict(lora.merged_tensors(saved(tmp_path)))
    config = ModelConfig(path=str(tmp_path / "adapter"))
    found = load_model(config, torch.float32, torch.device("cpu"))
    assert found.state_dict().keys() == merged.keys()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
    assert linear(torch.ones(1, 64), found.lm_head.weight).shape == (1, 64)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_factors_of_a_sum_multiply_to_the_sum_of_the_products(family):
    """Also of experts that are stored transposed."""
    one, other = (adapted(family, targets_of(family), seed=seed) for seed in (0, 1))
    summed = lora.summed_factors(one, lora.factors(one), lora.factors(other))
    theirs = lora.adapted_layers(other)
    expected = {
        name: lora.delta(layer) + lora.delta(theirs[name])
        for name, layer in lora.adapted_layers(one).items()
    }
    with lora.other_factors(one, summed):
        for name, layer in lora.adapted_layers(one).items():
            assert torch.allclose(lora.delta(layer), expected[name], atol=1e-6)
    assert max(float(each.abs().max()) for each in expected.values()) > 1e-3


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    tree = {"out": "x", "steps": 1, "model": {"path": "x"}, "task": {"kind": "chain"}}
    config = resolve(tree | {"train": {"lora": {}}})
    with pytest.raises(UsageError, match=r"train\.lora: peft is not installed; run pip install"):
        check_adapters(config.train.lora, config, config.model)
