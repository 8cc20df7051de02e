"""Metrics that verl's workers send as sums, and the shares that the log shows.

verl averages what a worker reports over micro-batches, ranks and minibatches, without weights. So a
worker reports numerators and denominators under `onepolicy/`, and the trainer divides their
averages once. The results have the names of every onepolicy run.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from onepolicy.divergence.routing import routing_disagreement
from onepolicy.types import RoutingTrace

REPLAY = "onepolicy/replay_"
LIVE = "onepolicy/live_"
UPDATE = "actor/"
"""verl's prefix of everything that an update reports."""


def replay_sums(
    trace: RoutingTrace | None,
    native: RoutingTrace | None,
    *,
    samples: int,
    missing: int,
    rows: int,
) -> dict[str, float]:
    """Return the sums of one micro-batch.

    Args:
        trace: its replayed rows, or None if it was routed natively.
        native: the routers' own choice for them.
        samples: samples with trained tokens.
        missing: those of them without a single route.
        rows: rows of all of them.
    """
    names = ("routers", "differing", "agreeing", "slots", "differing_slots", "valid")
    sums = dict.fromkeys(names, 0.0)
    if trace is not None and native is not None:
        found = routing_disagreement(trace, native)
        routers = found.slots * len(trace.layers)
        sums = {
            "routers": routers,
            "differing": found.routers * routers,
            "agreeing": (1 - found.experts / trace.top_k) * routers,
            "slots": found.slots,
            "differing_slots": found.tokens * found.slots,
            "valid": int(trace.valid.sum()),
        }
    sums |= {"samples": samples, "missing": missing, "rows": rows}
    return {REPLAY + name: float(value) for name, value in sums.items()}


def finish_update_metrics(metrics: MutableMapping[str, Any]) -> None:
    """Replace the workers' sums in an update's metrics by shares and means, in place."""
    replay = _take(metrics, UPDATE + REPLAY)
    if replay.get("routers"):
        metrics["routing/routers"] = replay["differing"] / replay["routers"]
        metrics["routing/tokens"] = replay["differing_slots"] / replay["slots"]
        metrics["routing/agreement"] = replay["agreeing"] / replay["routers"]
    if replay.get("samples"):
        metrics["replay/missing_samples"] = replay["missing"] / replay["samples"]
    if replay.get("rows"):
        metrics["replay/native_rows"] = 1 - replay["valid"] / replay["rows"]
    live = _take(metrics, UPDATE + LIVE)
    if live.get("tokens"):
        metrics["correction/rejected"] = 1 - live["kept"] / live["tokens"]
    if live.get("compared"):
        metrics["mismatch/k1"] = live["k1"] / live["compared"]
        metrics["mismatch/k3"] = live["k3"] / live["compared"]


def _take(metrics: MutableMapping[str, Any], prefix: str) -> dict[str, float]:
    names = [name for name in metrics if name.startswith(prefix)]
    return {name.removeprefix(prefix): float(metrics.pop(name)) for name in names}
