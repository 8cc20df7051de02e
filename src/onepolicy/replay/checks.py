"""What is refused before a forward runs: dense models, and traces that cannot belong to this model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import RoutingTrace

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class RoutingError(RuntimeError):
    """A router did not do what record or replay needs. The message names the decoder layer."""


def is_moe(hf_config: Any) -> bool:
    """Does this transformers config describe a model with more than one routed expert? Reads no weights."""
    text = hf_config.get_text_config()
    for config in (text, getattr(text, "ffn_config", None)):
        for name in _EXPERT_COUNTS:
            count = getattr(config, name, None)
            if isinstance(count, (list, tuple)):  # one number per layer
                count = max(count, default=0)
            if isinstance(count, int) and count > 1:
                return True
    return False


def preflight(hf_config: Any, mode: str = "r3") -> None:
    """Refuse replay on a dense model from its config alone, before any weight is read."""
    if not is_moe(hf_config):
        raise UsageError(
            f"replay.mode={mode} needs a Mixture-of-Experts model, but model_type={hf_config.model_type!r} has no "
            "routed experts; set replay.mode=off"
        )


def refuse_router_loss(hf_config: Any) -> None:
    """Refuse a load-balancing loss, which transformers computes from a top-k of its own, not from the replayed experts.

    `router_aux_loss_coef` alone is harmless: without `output_router_logits` no such loss exists.
    """
    if getattr(hf_config.get_text_config(), "output_router_logits", False):
        raise UsageError(
            "model.path: output_router_logits=True in the config adds a router auxiliary loss, which counts experts "
            "that were not used and pulls the routers away from those that were; set it to false"
        )


def check_trace(trace: RoutingTrace, *, layers: tuple[int, ...], num_experts: int, top_k: int) -> None:
    """Every valid row names `top_k` different experts of every MoE layer of this model, or UsageError."""
    if trace.layers != layers:
        raise UsageError(f"trace.layers is {trace.layers}, but the model's MoE layers are {layers}")
    if trace.num_experts != num_experts:
        raise UsageError(f"trace.num_experts is {trace.num_experts}, but the model has {num_experts} experts per layer")
    if trace.top_k != top_k:
        raise UsageError(f"trace has {trace.top_k} experts per token, but the model routes each token to {top_k}")
    ids = trace.ids.view(torch.int16) if trace.ids.dtype == torch.uint16 else trace.ids  # uint16 lacks comparisons
    wrong = _out_of_range(ids, num_experts) & trace.valid[:, None]
    if wrong.any():
        raise UsageError(f"trace.ids names an expert outside 0..{num_experts - 1} {_first(trace, wrong)}")
    wrong = _duplicated(ids) & trace.valid[:, None]
    if wrong.any():
        raise UsageError(
            f"trace.ids names an expert twice {_first(trace, wrong)}; rows without a captured route must have "
            "valid=False, not filler ids"
        )


def _out_of_range(ids: Tensor, num_experts: int) -> Tensor:  # [T, L, K] -> [T, L] bool
    wrong = ids >= num_experts
    if ids.dtype == torch.int16:  # the upper half of uint16
        wrong |= ids < 0
    return wrong.any(-1)


def _duplicated(ids: Tensor) -> Tensor:  # [T, L, K] -> [T, L] bool
    columns = ids.unbind(-1)
    found = torch.zeros(ids.shape[:2], dtype=torch.bool, device=ids.device)
    for i, column in enumerate(columns):
        for other in columns[i + 1 :]:
            found |= column == other
    return found


def _first(trace: RoutingTrace, wrong: Tensor) -> str:  # wrong [T, L] bool
    row, column = wrong.nonzero()[0].tolist()
    return f"at layer {trace.layers[column]}, row {row}: {trace.ids[row, column].tolist()}"
