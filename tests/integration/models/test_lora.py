"""Adapters in a model: their targets, base + adapter, files that peft loads, and gradients."""

import copy

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import linear

from onepolicy.config import UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.models.experts import NAME
from onepolicy.sync.adapters import Targets, add_adapter
from onepolicy.sync.sent_tensors import sent_tensors
from onepolicy.train.lora import Adapter, check_start
from support.models import CONFIGS, make

EVERYTHING = ("attention", "dense", "experts", "routers")
IDS = torch.arange(3, 17)[None]


def adapted(family="qwen3_moe", targets=None, *, rank=4, dtype=torch.float32, seed=0):
    """Return a model with adapters that are not at their zero start."""
    model = make(family, dtype=dtype)
    add_adapter(model, LoraConfig(rank=rank, targets=targets), "base", seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def kinds(family):
    return set(CONFIGS[family].to_dict())


def targets_of(family):
    """Return the kinds of weights that a family has."""
    found = Targets(make(family))
    return tuple(
        each for each in EVERYTHING if found.modules.get(each) or found.parameters.get(each)
    )


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_the_model_without_adapters_is_the_base(family):
    model = adapted(family, targets_of(family))
    with lora.adapters_off(model):
        assert torch.equal(logits(model), logits(make(family)))
        tensors = dict(lora.merged_tensors(model))
    base = make(family).state_dict()
    assert tensors.keys() == base.keys()
    assert all(torch.equal(tensors[name], base[name]) for name in base)
    assert not torch.equal(logits(model), logits(make(family)))


def test_adapters_stay_off_until_the_outer_context_ends():
    model = adapted()
    on, base = logits(model), logits(make("qwen3_moe"))
    with lora.adapters_off(model):
        with lora.adapters_off(model):
            assert torch.equal(logits(model), base)
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), on)


@pytest.mark.parametrize("family", CONFIGS)
def test_base_plus_adapter_is_the_model_with_adapters(family):
    model = adapted(family, targets_of(family))
    plain = make(family)
    plain.load_state_dict(dict(sent_tensors(model, None)))
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_difference_of_every_weight_is_that_of_peft(family):
    for layer in lora.adapted_layers(adapted(family, targets_of(family))).values():
        assert torch.equal(lora.delta(layer), layer.get_delta_weight(lora.ADAPTER))


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
    sent = dict(sent_tensors(model, "bfloat16"))
    for name, layer in lora.adapted_layers(model).items():
        assert torch.equal(sent[name], (base[name].float() + lora.delta(layer)).bfloat16())


@pytest.mark.parametrize("targets", [None, ("experts",), ("attention", "routers")])
def test_peft_loads_the_files(targets, tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path / "base")
    model = make("qwen3_moe")
    add_adapter(model, LoraConfig(rank=4, targets=targets), str(tmp_path / "base"), 0)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.normal_(std=0.05)
    (tmp_path / "adapter").mkdir()
    Adapter(model, "test").save(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(make("qwen3_moe"), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    assert lora.base_path(tmp_path / "adapter") == str(tmp_path / "base")


def test_an_adapter_is_refused_on_other_weights_ranks_and_targets(tmp_path):
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
    """The reference has no peft: base + B A alpha / rank is written into a plain model's forward by
    autograd, once for a linear layer and once for the experts' stacked weights."""
    model = adapted(targets=("attention", "experts"), rank=4)
    model.set_experts_implementation(NAME)
    model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 5].sum().backward()
    got = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = make("qwen3_moe")
    factors = {}
    effective = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    for name, layer in lora.adapted_layers(model).items():
        a = layer.lora_A[lora.ADAPTER].weight.detach().clone().requires_grad_()
        b = layer.lora_B[lora.ADAPTER].weight.detach().clone().requires_grad_()
        factors[name] = a, b
        weight = effective[name]
        if weight.dim() == 2:
            added = b @ a
        else:
            experts = len(weight)
            rows, columns = a.view(experts, 4, -1), b.view(len(b), 4, experts)
            added = torch.stack([columns[..., e] @ rows[e] for e in range(experts)])
        effective[name] = weight + 2.0 * added
    out = torch.func.functional_call(plain, effective, kwargs={"input_ids": IDS})
    out.logits.log_softmax(-1)[..., 5].sum().backward()

    assert len(got) == 2 * len(factors)
    for name, layer in lora.adapted_layers(model).items():
        for found, expected in zip(
            (layer.lora_A[lora.ADAPTER].weight, layer.lora_B[lora.ADAPTER].weight),
            factors[name],
            strict=True,
        ):
            scale = float(expected.grad.abs().max())
            assert float((found.grad - expected.grad).abs().max()) < 1e-4 * scale, name


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
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())


def test_an_adapter_folder_is_loaded_as_base_and_adapter_merged(tmp_path):
    from onepolicy.config import ModelConfig
    from onepolicy.models.load import load_model

    make("qwen3_moe").save_pretrained(tmp_path / "base")
    model = make("qwen3_moe")
    add_adapter(model, LoraConfig(rank=4), str(tmp_path / "base"), 0)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.normal_(std=0.05)
    (tmp_path / "adapter").mkdir()
    Adapter(model, "test").save(tmp_path / "adapter")
    found = load_model(
        ModelConfig(path=str(tmp_path / "adapter")), torch.float32, torch.device("cpu")
    )
    merged = dict(lora.merged_tensors(model))
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
