"""Tiny models with adapters that are not at their zero start."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora
from onepolicy.sync.adapters import Targets, add_adapter
from onepolicy.train.lora import Adapter
from support.models import make
from support.replay_models import take_grads

EVERYTHING = ("attention", "dense", "experts", "routers")
IDS = torch.arange(3, 17)[None]


def adapted(
    family: str = "qwen3_moe",
    targets: tuple[str, ...] | None = None,
    *,
    rank: int = 4,
    base: str = "same",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    path: str = "base",
    tensors: dict[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Return a model with adapters. tensors: the values of its base; path: where that is."""
    model = make(family, dtype=dtype)
    if tensors is not None:
        model.load_state_dict(tensors)
    add_adapter(model, LoraConfig(rank=rank, targets=targets, base=base), path, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    return model


def saved(folder: Path, targets: tuple[str, ...] | None = None) -> PreTrainedModel:
    """Save a model in folder/base and its adapters in folder/adapter. Return it with both."""
    make("qwen3_moe").save_pretrained(folder / "base")
    model = adapted(targets=targets, path=str(folder / "base"))
    (folder / "adapter").mkdir(exist_ok=True)
    Adapter(model, "test").save(folder / "adapter")
    return model


@cache
def targets_of(family: str) -> tuple[str, ...]:
    """Return the kinds of weights that a family has."""
    found = Targets(make(family))
    return tuple(
        each for each in EVERYTHING if found.modules.get(each) or found.parameters.get(each)
    )


def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the gradients of a loss on one token of the vocabulary."""
    logits(model).float().log_softmax(-1)[..., 5].sum().backward()
    return take_grads(model)


def check_gradients_by_hand(model: PreTrainedModel, base: dict[str, Tensor]) -> None:
    """Compare the gradients of a qwen3_moe's adapters with those of a loop without peft.

    base + B A alpha / rank is written into a plain model's forward by autograd, once for a linear
    layer and once for the experts' stacked weights.
    """
    found, plain, factors = gradients(model), make("qwen3_moe"), {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    effective = dict(base)
    for name, layer in lora.adapted_layers(model).items():
        a, b = (each.detach().clone().requires_grad_() for each in lora.factors_of(layer))
        factors |= {names[id(p)]: f for p, f in zip(lora.factors_of(layer), (a, b), strict=True)}
        added = b @ a
        if base[name].dim() == 3:
            experts = len(base[name])
            rows, columns = a.view(experts, 4, -1), b.view(len(b), 4, experts)
            added = torch.stack([columns[..., e] @ rows[e] for e in range(experts)])
        effective[name] = base[name] + 2.0 * added
    out = torch.func.functional_call(plain, effective, kwargs={"input_ids": IDS})
    out.logits.log_softmax(-1)[..., 5].sum().backward()
    assert found.keys() == factors.keys()
    for name, factor in factors.items():
        scale = float(factor.grad.abs().max())
        assert scale > 0, name
        assert float((found[name] - factor.grad).abs().max()) < 1e-4 * scale, name
