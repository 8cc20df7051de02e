"""A router's selection: its call, the answer to it, and the gate mass of replayed experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.replay.layers import Router

_TOPK = (torch.topk, torch.Tensor.topk)
_MAX = (torch.max, torch.Tensor.max)
_NO_TENSOR = torch.empty(0)


def topk_operands(
    router: Router, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[Tensor, int, int]:
    """Return (scores, k, width) of a call that selects k of `width` experts or groups per token.

    k is 0 for any other call. Routers with groups also score their groups with a 3-D top-k, whose
    last axis is as long as the experts' if there is one group. In routers without groups a 3-D call
    is the selection for [B, S] tokens.
    """
    if func not in _TOPK and not (router.by_max and func in _MAX):
        return _NO_TENSOR, 0, 0
    named = kwargs or {}
    scores = args[0] if args else named["input"]
    width = scores.shape[-1]
    if func in _MAX:  # one expert per call
        return scores, int(bool(named.get("keepdim"))), width
    k = args[1] if len(args) > 1 else named["k"]
    if scores.dim() > 2 and router.num_groups:
        return scores, 0, width
    selects_groups = router.num_groups > 1 and (k, width) == (router.top_groups, router.num_groups)
    if selects_groups or k == router.top_k:
        return scores, k, width
    return scores, 0, width


def flat(x: Tensor) -> Tensor:
    """Return x [..., n] as [T, n]; x itself if it has two dimensions."""
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def answer(func: Any, scores: Tensor, ids: Tensor) -> Any:
    """Return the result of `func` as if it had selected these ids [T, k]."""
    shape = (*scores.shape[:-1], ids.shape[1])
    if ids.shape != shape:
        ids = ids.view(shape)
    values = scores.gather(-1, ids)
    if func in _MAX:
        return torch.return_types.max((values, ids))
    return torch.return_types.topk((values, ids))


def groups_of(ids: Tensor, router: Router) -> Tensor:
    """Return the groups [T, max(K, top_groups)] to keep for the experts `ids` [T, K].

    No replayed expert must be masked out of its own scores, because DeepSeek-V2 weighs the scores
    that remain. A group may be named more than once: routers only mark the groups they are given.
    """
    groups = ids // (router.num_experts // router.num_groups)
    missing = router.top_groups - groups.shape[1]
    if missing <= 0:
        return groups
    return torch.cat([groups, groups[:, :1].expand(-1, missing)], 1)


def gate_mass(
    replayed: Tensor,  # [T, K]
    native: Tensor,  # [T, K]
    scores: Tensor,  # [T, E]
) -> Tensor:
    """Return [T] float32: the replayed experts' scores as a fraction of the best K experts' scores.

    It is in [0, 1], and 1 if both are the same experts or tied. With `low` the row's lowest score,

        gate_mass = sum(replayed - low) / sum(native - low)

    Subtracting `low` makes one definition serve all scores that a top-k may see: probabilities,
    sigmoids with a selection bias, logits. For softmax scores `low` is nearly 0, and the result is
    the ratio of the router's probabilities. Where scores are masked with -inf, `low` is the lowest
    of the scores compared.

    Args:
        replayed: scores of the replayed experts.
        native: scores of the experts that the router selects itself.
        scores: all scores that the router selects from.
    """
    low = scores.amin(-1, keepdim=True).float()
    compared = torch.where(replayed.isneginf(), native, torch.minimum(replayed, native))
    low = torch.where(low.isneginf(), compared.amin(-1, keepdim=True).float(), low)
    mass = (replayed.float() - low).clamp(min=0).sum(-1) / (native.float() - low).sum(-1)
    return mass.nan_to_num(nan=1.0, posinf=1.0)  # all scores are equal
