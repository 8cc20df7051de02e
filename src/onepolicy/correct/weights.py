"""Importance weights and rejections against rollout/trainer mismatch, over all slots of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, overload

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError, Weight
from onepolicy.correct.presets import check_config
from onepolicy.correct.report import Sums, combine, report, sums
from onepolicy.correct.slots import Fields, Slots
from onepolicy.correct.statistics import (
    Edges,
    Units,
    budget_edges,
    combine_units,
    gate_keeps,
    inside,
    needed,
    unit_sums,
    weight_log_ratio,
)
from onepolicy.layout import Layout, restore_layout
from onepolicy.nonfinite import LeftOut, Nonfinite

Average = Literal["slots", "sequences"]
"""The loss is the mean over all slots, or the mean over sequences of their means over slots."""
Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True, eq=False)
class Applied(Generic[Shape]):
    """Weights for the loss: sum(keep * weight * surrogate) / denominator."""

    weight: Shape  # [T] float32, detached; 0 where not kept
    keep: Shape  # [T] bool, the mask minus rejected slots
    denominator: int  # slots of the original mask: rejecting some never makes the others louder
    report: dict[str, float]
    nonfinite: LeftOut  # slots rejected because a log-probability is not finite


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Weights of a part of the step; `finish` adds the factor that needs the whole step."""

    slots: Slots
    weight: Tensor  # [n] float64, 0 where not kept
    keep: Tensor  # [n] bool
    passed: Tensor  # [n] bool, `keep` before the weight's bounds reject
    sums: Sums


@overload
def reweight(
    logp_old: Tensor,
    logp_rollout: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    *,
    segment: Tensor | None = None,
    turn: Tensor | None = None,
    advantage: Tensor | None = None,
    average: Average = "slots",
    nonfinite: Nonfinite = "skip",
) -> Applied[Tensor]: ...
@overload
def reweight(
    logp_old: Sequence[Tensor],
    logp_rollout: Sequence[Tensor],
    mask: Sequence[Tensor],
    config: CorrectionConfig,
    *,
    turn: Sequence[Tensor] | None = None,
    advantage: Sequence[Tensor] | None = None,
    average: Average = "slots",
    nonfinite: Nonfinite = "skip",
) -> Applied[list[Tensor]]: ...
@torch.no_grad()
def reweight(
    logp_old: Layout,  # [T] float32, trainer before the update; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, trainable slots; the other slots may hold anything
    config: CorrectionConfig,
    *,
    segment: Layout | None = None,  # int64, sequence of each slot; [B, T] and lists need none
    turn: Layout | None = None,  # int64, turn of each slot
    advantage: Layout | None = None,  # float32, for gates that look at its sign
    average: Average = "slots",
    nonfinite: Nonfinite = "skip",  # reject slots whose values are not finite, or raise
) -> Applied[Any]:
    """Return weight and rejection of every slot's surrogate.

    They come from rho = exp(logp_old - logp_rollout). The weight is rho of the slot, or of its turn
    or sequence, within the weight's bounds. Gates reject slots on top (settings section
    `correction`; presets are in config/corrections.toml). A slot whose log-ratio is not finite is
    rejected with every unit it belongs to, and counted. `normalise` and `denominator = kept` are
    factors on all weights, so the denominator stays the original count.

    Raises UsageError if the mask is empty, if probabilities stand for their logarithms, if more
    slots are not finite than the config's `max_nonfinite`, or any with `nonfinite` = "raise", or
    if the config needs the policy that is being trained, which only the loss has (`live_weights`).
    """
    check_config("reweight", config)
    if config.live:
        raise UsageError(
            f"reweight: correction {config.name} needs the ratio of the policy that is being "
            "trained, which exists only in the loss; give reweight its `fixed_part` and call "
            "live_weights with its `live_part` in the loss"
        )
    _check_average("reweight", average)
    given = {"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}
    flat = Fields.of("reweight", given, segment=segment, turn=turn, advantage=advantage)
    count = int(flat.mask.sum())
    if not count:
        raise UsageError(
            f"reweight: the mask selects none of {len(flat.mask)} slots; there is nothing to "
            "train on"
        )
    left = flat.left_out("reweight", "logp_old", nonfinite, mask)
    weight, keep, numbers = weigh(config, flat, average=average)
    return Applied(restore_layout(weight, mask), restore_layout(keep, mask), count, numbers, left)


@torch.no_grad()
def weigh(
    config: CorrectionConfig, fields: Fields, *, average: Average = "slots"
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return weight [T] float32, keep [T] bool and the report of a whole step.

    This is `reweight` for fields that are known to fit together: it only raises UsageError for more
    slots without a finite ratio than the config's `max_nonfinite`.
    """
    found = evaluate(config, fields, average=average)
    numbers = _checked_report(config, found.sums)
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
    if average == "sequences" or needed(config):
        units = combine_units(unit_sums(config, part) for _, part in batch.chunks())
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
        found = _evaluate(config, part, units, edges, average)
        weight[place][part.where] = found.weight.to(weight.dtype)
        keep[place][part.where], passed[place][part.where] = found.keep, found.passed
        if total is None:
            total = found.sums
        else:
            total = combine([total, found.sums])
    assert total is not None, "chunks() yields at least one chunk"
    return Evaluated(weight, keep, passed, total)


@torch.no_grad()
def partials(
    config: CorrectionConfig,
    slots: Slots,
    units: Units | None = None,
    *,
    average: Average = "slots",
) -> Partial:
    """Return the weights of a part of the step that holds whole sequences.

    With the `units` of the whole step (`combine_units`) a part may hold pieces of sequences. For
    the step, `combine` the `sums` of all parts over micro-batches and ranks, then `finish` each
    part with the result. Raises UsageError if the config has a budget gate, which ranks all slots
    of the step.
    """
    check_config("partials", config)
    _check_average("partials", average)
    if not isinstance(slots, Slots):
        raise UsageError(
            f"partials: slots is {type(slots).__name__}; pass op.slots(logp_old, logp_rollout, "
            "mask, segment=..)"
        )
    if any(gate.aggregate == "budget" for gate in config.gates):
        raise UsageError(
            "partials: a budget gate ranks all slots of the step against each other; use reweight"
        )
    if units is None:
        units = unit_sums(config, slots)
    return _evaluate(config, slots, units, {}, average)


@torch.no_grad()
def finish(
    config: CorrectionConfig, part: Partial, total: Sums
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return weight [T] float32 and keep [T] bool of this part, and the report of the whole step.

    `total` is `combine` of the sums of all parts of the step.
    """
    check_config("finish", config)
    if not isinstance(part, Partial) or not isinstance(total, Sums):
        raise UsageError(
            f"finish: part is {type(part).__name__} and total {type(total).__name__}, expected the "
            "result of op.partials and op.combine of the `sums` of all parts"
        )
    numbers = _checked_report(config, total)
    weight = (part.weight * total.scale(config)).float()
    return part.slots.scatter(weight), part.slots.scatter(part.keep), numbers


def _check_average(caller: str, average: object) -> None:
    if average not in get_args(Average):
        expected = " or ".join(map(repr, get_args(Average)))
        raise UsageError(f"{caller}: average is {average!r}, expected {expected}")


def _checked_report(config: CorrectionConfig, total: Sums) -> dict[str, float]:
    numbers = report(config, total)
    if numbers["correction/nonfinite"] > config.max_nonfinite:
        raise UsageError(
            f"reweight: the ratio is not finite on {numbers['correction/nonfinite']:.1%} of the "
            f"slots, more than the correction's max_nonfinite = {config.max_nonfinite}; fix the "
            "engine that returned such log-probabilities"
        )
    return numbers


def _evaluate(
    config: CorrectionConfig, slots: Slots, units: Units, edges: Edges, average: Average
) -> Partial:
    raw = weight_log_ratio(config, slots, units)
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
