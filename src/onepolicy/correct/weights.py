"""Importance weights and rejections against rollout/trainer mismatch, over all slots of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError, Weight
from onepolicy.correct.report import Sums, combine, report, sums
from onepolicy.correct.slots import WEIGHT_LOG_RATIO_LIMIT, Fields, Slots
from onepolicy.correct.statistics import (
    Edges,
    Units,
    budget_edges,
    combine_units,
    gate_keeps,
    inside,
    unit_index,
    unit_sums,
    weight_scope,
)

Average = Literal["slots", "sequences"]
"""The loss is the mean over all slots, or the mean over sequences of their means over slots."""


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Weights of a part of the step; `finish` adds the factor that needs the whole step."""

    slots: Slots
    weight: Tensor  # [n] float64, 0 where not kept
    keep: Tensor  # [n] bool
    passed: Tensor  # [n] bool, `keep` before the weight's bounds reject
    sums: Sums


@torch.no_grad()
def weigh(
    config: CorrectionConfig, fields: Fields, *, average: Average = "slots"
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return weight [T] float32, keep [T] bool and the report of a whole step.

    This is `reweight` for fields that are known to fit together: it only raises UsageError for more
    slots without a finite ratio than the config's `max_nonfinite`.
    """
    found = evaluate(config, fields, average=average)
    numbers = checked_report(config, found.sums)
    return found.weight.mul_(found.sums.scale(config)).float(), found.keep, numbers


class Evaluated(NamedTuple):
    """Weights of a whole batch, before the factor that its sums give."""

    weight: Tensor  # [T] float32, float64 if the config scales it; 0 where not kept
    keep: Tensor  # [T] bool
    passed: Tensor  # [T] bool, `keep` before the weight's bounds reject
    sums: Sums


def evaluate(config: CorrectionConfig, fields: Fields, *, average: Average = "slots") -> Evaluated:
    """Evaluate weights and gates of a whole step or of whole samples, chunk by chunk."""
    batch = fields.numbered()
    units: Units = {}
    if average == "sequences" or _spans_slots(config):
        units = combine_units(unit_sums(config, part) for _, part in batch.chunks())
    edges: Edges = {}
    if has_budget(config):
        edges = budget_edges(config, lambda: (part for _, part in batch.chunks()))
    new = fields.logp_trainer.new_zeros
    dtype = torch.float32
    if config.normalise != "none" or config.denominator == "kept":  # `Sums.scale` follows
        dtype = torch.float64
    weight = new(len(fields.mask), dtype=dtype)
    keep = torch.zeros_like(fields.mask)
    passed = keep
    if config.weight.outside == "zero":
        passed = torch.zeros_like(fields.mask)
    total = None
    for place, part in batch.chunks():
        found = evaluate_part(config, part, units, edges, average)
        weight[place][part.where] = found.weight.to(weight.dtype)
        keep[place][part.where], passed[place][part.where] = found.keep, found.passed
        if total is None:
            total = found.sums
        else:
            total = combine([total, found.sums])
    assert total is not None, "chunks() yields at least one chunk"
    return Evaluated(weight, keep, passed, total)


def checked_report(config: CorrectionConfig, total: Sums) -> dict[str, float]:
    """Return the report. Raises UsageError if too many slots have no finite ratio."""
    numbers = report(config, total)
    if numbers["correction/nonfinite"] > config.max_nonfinite:
        raise UsageError(
            f"reweight: the ratio is not finite on {numbers['correction/nonfinite']:.1%} of the "
            f"slots, more than the correction's max_nonfinite = {config.max_nonfinite}; fix the "
            "side that returned such log-probabilities: an engine, or a trainer whose weights broke"
        )
    return numbers


def evaluate_part(
    config: CorrectionConfig, slots: Slots, units: Units, edges: Edges, average: Average
) -> Partial:
    """Evaluate some slots. units, edges: of the whole step, as the config needs them."""
    raw = _weight_log_ratio(config, slots, units)
    gates = [gate_keeps(gate, slots, units, edges) for gate in config.gates]
    bounds = config.weight
    known = slots.log_ratio.isfinite() & raw.isfinite()
    passed = known
    for passes in gates:
        passed = passed & passes
    keep = passed
    if bounds.outside == "zero":
        gates.append(inside(raw, bounds.low, bounds.high, log=True))
        keep = passed & gates[-1]
    weight, clipped = _bounded(raw, keep, bounds)
    averaged, mass = weight, None
    if config.normalise == "batch":
        before = known
        if bounds.outside == "zero":
            before = known & gates[-1]
        averaged, mass = _bounded(raw, before, bounds)[0], known.double()
        if bounds.level in ("sequence", "geometric"):
            mass = mass * _share_of_sequence(slots, units)
    elif average == "sequences":
        mass = _share_of_sequence(slots, units)
    measured = sums(
        log_ratio=slots.log_ratio,
        weight=weight,
        keep=keep,
        clipped=clipped.sum(),
        gates=gates,
        averaged=averaged,
        mass=mass,
    )
    return Partial(slots, weight, keep, passed, measured)


def has_budget(config: CorrectionConfig) -> bool:
    """Return whether a gate ranks all slots of the step against each other."""
    return any(gate.aggregate == "budget" for gate in config.gates)


def _spans_slots(config: CorrectionConfig) -> bool:
    """Return whether the weight or a gate is of a turn or sequence."""
    spans = any(gate.scope != "token" for gate in config.gates)
    return spans or config.weight.level not in ("none", "token")


def _weight_log_ratio(config: CorrectionConfig, slots: Slots, units: Units) -> Tensor:
    """Return [n] float64: the log of the weight before its bounds, clamped."""
    match config.weight.level:
        case "none":
            return 0 * slots.log_ratio  # NaN stays NaN
        case "token":
            return slots.log_ratio
        case level:
            scope = weight_scope(level)
            how = {"geometric": "mean"}.get(level, "sum")
            values = units[f"ratio/{scope}"].aggregate(how)
            values = values.clamp(-WEIGHT_LOG_RATIO_LIMIT, WEIGHT_LOG_RATIO_LIMIT)
            return values[unit_index(slots, scope)[0]]


def _bounded(raw: Tensor, keep: Tensor, bounds: Weight) -> tuple[Tensor, Tensor]:
    """Return the weights [n] within their bounds, 0 where not kept, and where they were moved."""
    weight = torch.where(keep, raw, -torch.inf).exp_()
    if bounds.outside == "zero" or (bounds.low is None and bounds.high is None):
        return weight, torch.zeros_like(keep)
    inner = weight.clamp(bounds.low, bounds.high)
    return torch.where(keep, inner, 0.0), keep & (inner != weight)


def _share_of_sequence(slots: Slots, units: Units) -> Tensor:
    """Return [n] float64: 1 / the number of slots in the slot's sequence."""
    if slots.segment is None:
        raise UsageError("reweight: average = sequences needs the `segment` of each slot")
    return 1 / units["slots/sequence"].slots[slots.segment]
