"""Adapters of train.lora in a plan: parameters, optimiser and the bytes of a sync."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from onepolicy.config.lora import LoraConfig
from onepolicy.plan.dims import Dims
from onepolicy.sync.adapters import Targets


def with_adapters(dims: Dims, model: PreTrainedModel, config: LoraConfig) -> Dims:
    """Return the dimensions with those of A and B. `model` may be made of fake tensors.

    Raises UsageError for targets that the model does not have.
    """
    modules, parameters = Targets(model).choose(config.targets, type(model).__name__)
    names = [*(f"{path}.weight" for path in modules), *parameters]
    count = sum(_elements(tuple(model.get_parameter(name).shape), config.rank) for name in names)
    four_bit = 0
    if config.base == "nf4":
        four_bit = sum(model.get_parameter(name).numel() for name in Targets(model).matrices)
    return replace(dims, adapter=count, four_bit=four_bit)


def _elements(shape: tuple[int, ...], rank: int) -> int:
    """Return the elements of A and B of a weight [O, I], or of every expert of [E, O, I]."""
    experts = shape[0] if len(shape) == 3 else 1
    return experts * rank * (shape[-1] + shape[-2])
