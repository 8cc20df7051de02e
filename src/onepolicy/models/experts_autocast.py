"""Experts under autocast on devices other than a CPU: `grouped_mm` with cast weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward


class _CastExperts:
    """An experts module as `grouped_mm` reads it, with weights cast to another dtype."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self._module = module
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, parameter.to(dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def run_in_dtype(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, dtype: torch.dtype
) -> Tensor:
    """Run the experts by `grouped_mm` in `dtype`, whatever dtype their parameters have.

    torch's autocast leaves grouped_mm alone. With float32 weights it has no kernel on a GPU, and
    transformers loops over the experts after a host read. Shapes as of `experts.grouped_experts`;
    gradients reach the parameters in their dtype.
    """
    experts: Any = _CastExperts(module, dtype)  # it has the attributes that are read
    out = grouped_mm_experts_forward(experts, hidden.to(dtype), top_k_index, top_k_weights)
    return out.to(hidden.dtype)
