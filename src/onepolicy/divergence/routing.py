"""Disagreement between two routing traces of the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.types import RoutingTrace

MAX_ROWS = 2**18
"""Routers that are compared as sets at a time, each in K * K bytes."""

MAX_PAIRS = 2**26
"""Pairs of ids that `differing_experts` compares at a time, a byte each."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingDisagreement:
    """Shares of routes with different experts, over n slots valid in both traces.

    See the R3 paper, section 3.2. A router is one (slot, layer) pair. It differs if its two sets of
    K experts differ, in any order.
    """

    slots: int  # n
    routers: float  # share of routes that differ
    tokens: float  # share of slots with at least one differing router
    sequence: float  # mean of sequence_mean (differing routers per token); nan without `segment`
    experts: float  # mean number of differing experts per router
    expert_counts: Tensor = field(repr=False)  # [K + 1] int64, routers with 0..K differing experts
    per_layer: Tensor = field(repr=False)  # [L] float64, share of slots whose router differs
    per_token_count: Tensor = field(repr=False)  # [n] int64, differing routers of each slot
    sequence_mean: Tensor = field(
        repr=False
    )  # [S] float64, differing routers per token of a sample

    def metrics(self, prefix: str = "routing") -> dict[str, float]:
        """Return the shares by metric name, `prefix/routers` and so on."""
        return {
            f"{prefix}/{name}": getattr(self, name) for name in ("routers", "tokens", "sequence")
        }


def routing_disagreement(
    a: RoutingTrace,
    b: RoutingTrace,
    *,
    segment: Tensor | None = None,  # [T] int64, sample index of each slot
    differing: Tensor | None = None,  # [T, L] uint8
) -> RoutingDisagreement:
    """Compare expert sets slot by slot and layer by layer. Symmetric in `a` and `b`.

    differing: `router_differences(a, b)` where it is known already. Raises UsageError if the traces
    are not of the same model and path, or share no valid slot.
    """
    _check_comparable(a, b)
    if segment is not None and (not isinstance(segment, Tensor) or segment.shape != (len(a),)):
        raise UsageError(
            f"routing_disagreement: segment is {describe_argument(segment)}, expected whole "
            f"numbers [{len(a)}]"
        )
    compared = (a.valid & b.valid).nonzero()[:, 0]
    n, layers = len(compared), len(a.layers)
    if n == 0:
        raise UsageError(
            f"routing_disagreement: none of {len(a)} slots is valid in both traces; nothing to "
            "compare"
        )
    if differing is None:
        differing = router_differences(a, b)
    differing = differing[compared]  # [n, L]
    per_token, per_layer = (differing > 0).sum(1), (differing > 0).sum(0).double() / n
    wrong = torch.arange(a.top_k + 1, device=differing.device)
    counts = torch.stack([(differing == count).count_nonzero() for count in wrong.tolist()])
    sequence_mean = per_layer.new_empty(0)
    if segment is not None:
        sequence_mean = _mean_by(segment[compared], per_token)
    return RoutingDisagreement(
        slots=n,
        routers=per_token.sum().item() / (n * layers),
        tokens=(per_token > 0).sum().item() / n,
        sequence=sequence_mean.mean().item(),
        experts=(counts * wrong).sum().item() / (n * layers),
        expert_counts=counts,
        per_layer=per_layer,
        per_token_count=per_token,
        sequence_mean=sequence_mean,
    )


def routing_agreement(
    a: RoutingTrace,
    b: RoutingTrace,
    *,
    differing: Tensor | None = None,  # [T, L] uint8
) -> Tensor:
    """Return [n, L] float32, the share of each router's K experts that both traces chose.

    n is the number of slots valid in both traces. differing: `router_differences(a, b)` where it is
    known already.
    """
    _check_comparable(a, b)
    if differing is None:
        differing = router_differences(a, b)
    return 1 - differing[a.valid & b.valid].float() / a.top_k


def router_differences(a: RoutingTrace, b: RoutingTrace) -> Tensor:
    """Return [T, L] uint8, the number of each router's K experts that the other trace lacks.

    It is 0 in slots that are not valid in both traces.
    """
    _check_comparable(a, b)
    differing = torch.zeros(a.ids.shape[:2], dtype=torch.uint8, device=a.ids.device)
    # Most routers chose the same experts in the same order. Only the others are compared as sets.
    unequal = (row_words(a.ids) != row_words(b.ids)).any(-1)
    slots, layers = (unequal & (a.valid & b.valid)[:, None]).nonzero(as_tuple=True)
    left, right = (signed_ids(trace.ids) for trace in (a, b))
    for at in zip(slots.split(MAX_ROWS), layers.split(MAX_ROWS), strict=True):
        differing[at] = differing_experts(left[at], right[at]).to(torch.uint8)
    return differing


def signed_ids(ids: Tensor) -> Tensor:
    """Return uint16 ids, for which torch has few kernels, as int16; others as they are."""
    if ids.dtype == torch.uint16:
        return ids.view(torch.int16)
    return ids


def row_words(ids: Tensor) -> Tensor:  # [..., K] -> [..., W] integer
    """Return the same bits in the fewest integers per row, for comparisons of whole rows."""
    row_bytes = ids.shape[-1] * ids.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes and row_bytes % dtype.itemsize == 0:
            return ids.contiguous().view(dtype)
    return ids


def column_agreement(a: RoutingTrace, b: RoutingTrace, column: int, other: int) -> float:
    """Return the mean agreement of one layer of `a` with a layer of `b`, by their columns."""
    left, right = (
        RoutingTrace(trace.ids[:, at : at + 1], trace.valid, (0,), trace.num_experts)
        for trace, at in ((a, column), (b, other))
    )
    return float(routing_agreement(left, right).mean())


def differing_experts(a: Tensor, b: Tensor) -> Tensor:  # [n, K], [n, K] integer -> [n] int64
    """Return for each row the number of ids that the other side lacks.

    It is the larger of the two sides' numbers, which differ if a row repeats an id. Only rows that
    differ in a column are compared as sets.
    """
    rows = (a != b).any(1).nonzero()[:, 0]
    lacking = torch.zeros(len(a), dtype=torch.int64, device=a.device)
    for some in rows.split(max(1, MAX_PAIRS // max(1, a.shape[1]) ** 2)):
        equal = a[some][:, :, None] == b[some][:, None, :]
        lacking[some] = torch.maximum((~equal.any(2)).sum(1), (~equal.any(1)).sum(1))
    return lacking


def _check_comparable(a: RoutingTrace, b: RoutingTrace) -> None:
    for name, trace in (("a", a), ("b", b)):
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"routing_disagreement: {name} is {type(trace).__name__}, expected a RoutingTrace"
            )
    for name, left, right in (
        ("slots", len(a), len(b)),
        ("layers", a.layers, b.layers),
        ("num_experts", a.num_experts, b.num_experts),
        ("top_k", a.top_k, b.top_k),
    ):
        if left != right:
            raise UsageError(
                f"routing_disagreement: {name} differ ({left} and {right}); compare two traces of "
                "one model and path"
            )


def _mean_by(segment: Tensor, values: Tensor) -> Tensor:
    samples, index = segment.unique(return_inverse=True)
    total = torch.zeros(len(samples), dtype=torch.float64, device=values.device)
    return total.index_add(0, index, values.double()) / torch.bincount(index)
