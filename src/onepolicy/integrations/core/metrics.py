"""Metrics by the same names in every trainer. Only a prefix in front of them is the trainer's.

Trainers average logged numbers over ranks and micro-batches without weights, so give these
functions whole steps where you can.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepolicy.divergence.logprob import mismatch
from onepolicy.divergence.routing import routing_agreement, routing_disagreement
from onepolicy.integrations.core.layout import fit
from onepolicy.nonfinite import leave_out
from onepolicy.types import RoutingTrace

LARGEST = ("max_dlogp", "max_dp", "weight_max", "ratio_max")
"""Last parts of names whose value over ranks is the largest."""
COUNTS = ("differing", "slots", "kept", "denominator", "rows")
"""Last parts of names whose value over ranks is the sum. Of the other names it is the mean."""


def mismatch_metrics(
    logp_old: Tensor,  # [B, T] float32, trainer before the update
    logp_rollout: Tensor,  # [B, T] float32, rollout engine
    mask: Tensor,  # [B, T] bool, the sampled tokens
    *,
    prefix: str = "mismatch",
) -> dict[str, float]:
    """Return `mismatch/k3` and so on, over the tokens where both log-probabilities are finite.

    `mismatch/nonfinite` is the share of the other tokens. Without a finite token it is the only
    metric. A step without tokens has no metrics.
    """
    mask = mask.bool()
    if not mask.any():
        return {}
    finite, left = leave_out(mask, {"logp_old": logp_old, "logp_rollout": logp_rollout})
    metrics = {f"{prefix}/nonfinite": left.count / left.tokens}
    if finite.any():
        metrics |= mismatch(logp_old, logp_rollout, finite).metrics(prefix)
    return metrics


def routing_metrics(
    replayed: Sequence[RoutingTrace | None], native: Sequence[RoutingTrace | None]
) -> dict[str, float]:
    """Return the disagreement of replayed routes with the routers' own choice on the same tokens.

    `routing/routers` and `routing/tokens` are shares that differ (R3 paper, section 3.2,
    arXiv:2510.11370). `routing/agreement` is the mean share of a router's K experts that both
    chose. Samples without a trace on both sides do not count; without any there are no metrics.

    Args:
        replayed: each sample's trace.
        native: each sample's own choice, with as many rows or more.
    """
    pairs = [
        (trace, fit(own, len(trace)).to(trace.ids.device))
        for trace, own in zip(replayed, native, strict=True)
        if trace is not None and own is not None and trace.valid.any()
    ]
    if not pairs:
        return {}
    whole = RoutingTrace.concat([trace for trace, _ in pairs])
    own = RoutingTrace.concat([own for _, own in pairs])
    found = routing_disagreement(whole, own)
    return {
        "routing/routers": found.routers,
        "routing/tokens": found.tokens,
        "routing/agreement": routing_agreement(whole, own).mean().item(),
    }


def replay_metrics(
    traces: Sequence[RoutingTrace | None], tokens: Sequence[int]
) -> dict[str, float]:
    """Return counts of the routes that a step replays.

    `replay/rows` rows are replayed. `replay/native_rows` is the share of the other rows, those that
    the trainer routes itself, over all samples, and `replay/missing_samples` the share of samples
    without any route. A step without samples has no metrics.

    Args:
        traces: each sample's trace; None for one without routes.
        tokens: each sample's prompt and response. It has a row for all but the last.
    """
    if not traces:
        return {}
    known = [trace for trace in traces if trace is not None and trace.valid.any()]
    rows = sum(
        n - 1 if trace is None else len(trace) for trace, n in zip(traces, tokens, strict=True)
    )
    valid = sum(int(trace.valid.sum()) for trace in known)
    metrics = {
        "replay/rows": float(valid),
        "replay/missing_samples": 1 - len(known) / len(traces),
    }
    if rows:
        metrics["replay/native_rows"] = 1 - valid / rows
    return metrics
