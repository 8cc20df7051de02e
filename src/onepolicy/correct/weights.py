"""Importance weights and rejections against rollout/trainer mismatch, once per step, over all slots of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar, get_args, overload

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.correct.presets import check_config
from onepolicy.correct.receipt import Sums, combine, report, sums
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
from onepolicy.layout import Layout, restore

Average = Literal["slots", "sequences"]
"""What the loss averages over: all slots (token mean), or sequences (mean over sequences of their token means)."""
Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True, eq=False)
class Applied(Generic[Shape]):
    """What the loss multiplies in: sum(keep * weight * surrogate) / denominator."""

    weight: Shape  # [T] float32, detached; 0 where not kept
    keep: Shape  # [T] bool, the mask minus rejected slots
    denominator: int  # slots of the original mask: rejecting some never makes the others louder
    report: dict[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Weights of a part of the step, before what needs the whole step (see `finish`)."""

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
) -> Applied[list[Tensor]]: ...
@torch.no_grad()
def reweight(
    logp_old: Layout,  # [T] float32, trainer before the update; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, trainable slots; the other slots may hold anything
    config: CorrectionConfig,
    *,
    segment: Layout
    | None = None,  # int64, sequence of each slot; rows of [B, T] and lists need none
    turn: Layout | None = None,  # int64, turn of each slot
    advantage: Layout | None = None,  # float32, for gates that look at its sign
    average: Average = "slots",
) -> Applied:
    """Weight and rejection of every slot's surrogate, from rho = exp(logp_old - logp_rollout).

    weight: rho of the slot, or of its turn or sequence, within the weight's bounds; gates reject slots on top (config
    section `correction`, presets by name in config/corrections.toml). A slot whose log-ratio is not finite is rejected
    with every unit it belongs to. normalise = self and denominator = kept are a factor on all weights, so the
    denominator stays the original count. Raises UsageError on an empty mask, on too many slots that are not finite, and
    if the config needs the policy that is being trained, which only the loss has (`live_weights`).
    """
    check_config("reweight", config)
    if config.live:
        raise UsageError(
            f"reweight: correction {config.name} needs the ratio of the policy that is being trained, which exists in "
            "the loss only; give reweight its `fixed_part` and call live_weights with its `live_part` there"
        )
    _check_average("reweight", average)
    given = {"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}
    flat = Fields.of("reweight", given, segment=segment, turn=turn, advantage=advantage)
    if not (count := int(flat.mask.sum())):
        raise UsageError(
            f"reweight: the mask selects none of {len(flat.mask)} slots; there is nothing to train on"
        )
    found = evaluate(config, flat, average=average)
    numbers = _checked_report(config, found.sums)
    weight = found.weight.mul_(found.sums.scale(config)).float()
    return Applied(restore(weight, mask), restore(found.keep, mask), count, numbers)


class Evaluated(NamedTuple):
    """Of a whole batch, before what its sums scale."""

    weight: Tensor  # [T] float32, float64 if the config scales it; 0 where not kept
    keep: Tensor  # [T] bool
    passed: Tensor  # [T] bool, `keep` before the weight's bounds reject
    sums: Sums


def evaluate(config: CorrectionConfig, fields: Fields, *, average: Average = "slots") -> Evaluated:
    """Weights and gates of a whole step (live: of whole samples), a chunk of slots at a time."""
    units: Units = {}
    if average == "sequences" or needed(config):
        units = combine_units(unit_sums(config, part) for _, part in fields.chunks())
    edges = budget_edges(config, lambda: (part for _, part in fields.chunks()))
    new = fields.logp_trainer.new_zeros
    weight = new(len(fields.mask), dtype=torch.float64 if config.scales else torch.float32)
    keep = torch.zeros_like(fields.mask)
    passed = torch.zeros_like(fields.mask) if config.weight.rejects else keep
    total = None
    for place, part in fields.chunks():
        found = _evaluate(config, part, units, edges, average)
        weight[place][part.where] = found.weight.to(weight.dtype)
        keep[place][part.where], passed[place][part.where] = found.keep, found.passed
        total = found.sums if total is None else combine([total, found.sums])
    assert total is not None, "there is always a chunk, if an empty one"
    return Evaluated(weight, keep, passed, total)


@torch.no_grad()
def partials(
    config: CorrectionConfig,
    slots: Slots,
    units: Units | None = None,
    *,
    average: Average = "slots",
) -> Partial:
    """Weights of a part of the step: whole sequences, or with `units` of the whole (`combine_units`) a chunk of some.

    The step: `combine` the `sums` of all parts (add them up over ranks), then `finish` each part with the result.
    """
    check_config("partials", config)
    _check_average("partials", average)
    if not isinstance(slots, Slots):
        raise UsageError(
            f"partials: slots is {type(slots).__name__}; pass op.slots(logp_old, logp_rollout, mask, segment=..)"
        )
    if any(gate.aggregate == "budget" for gate in config.gates):
        raise UsageError(
            "partials: a budget gate ranks all slots of the step against each other; use reweight"
        )
    return _evaluate(
        config, slots, unit_sums(config, slots) if units is None else units, {}, average
    )


@torch.no_grad()
def finish(
    config: CorrectionConfig, part: Partial, total: Sums
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """weight [T] float32 and keep [T] bool of this part, and the report of the step whose sums are `total`."""
    check_config("finish", config)
    if not isinstance(part, Partial) or not isinstance(total, Sums):
        raise UsageError(
            f"finish: part is {type(part).__name__} and total {type(total).__name__}, expected what op.partials gave "
            "and op.combine of the `sums` of all parts"
        )
    numbers = _checked_report(config, total)
    weight = (part.weight * total.scale(config)).float()
    return part.slots.scatter(weight), part.slots.scatter(part.keep), numbers


def _check_average(caller: str, average: object) -> None:
    if average not in get_args(Average):
        raise UsageError(
            f"{caller}: average is {average!r}, expected {' or '.join(map(repr, get_args(Average)))}"
        )


def _checked_report(config: CorrectionConfig, total: Sums) -> dict[str, float]:
    numbers = report(config, total)
    if numbers["correction/nonfinite"] > config.max_nonfinite:
        raise UsageError(
            f"reweight: the ratio is not finite on {numbers['correction/nonfinite']:.1%} of the slots, more than "
            f"the correction's max_nonfinite = {config.max_nonfinite}; mend the engine that returned such "
            "log-probabilities"
        )
    return numbers


def _evaluate(
    config: CorrectionConfig, slots: Slots, units: Units, edges: Edges, average: Average
) -> Partial:
    raw = weight_log_ratio(config, slots, units)
    gates = [gate_keeps(gate, slots, units, edges) for gate in config.gates]
    bounds = config.weight
    passed = slots.log_ratio.isfinite() & raw.isfinite()
    for passes in gates:
        passed = passed & passes
    keep = passed
    if bounds.rejects:
        gates.append(inside(raw, bounds.low, bounds.high, log=True))
        keep = passed & gates[-1]
    weight = torch.where(keep, raw, -torch.inf).exp_()
    clipped = keep.new_zeros((), dtype=torch.int64)
    if bounds.bounded and not bounds.rejects:
        inner = weight.clamp(bounds.low, bounds.high)
        clipped = (keep & (inner != weight)).sum()
        weight = torch.where(keep, inner, 0.0)
    mass = None
    if average == "sequences":
        if slots.segment is None:
            raise UsageError("reweight: average = sequences needs the `segment` of each slot")
        mass = 1 / units["slots/sequence"].slots[slots.segment]
    measured = sums(
        log_ratio=slots.log_ratio, weight=weight, keep=keep, clipped=clipped, gates=gates, mass=mass
    )
    return Partial(slots, weight, keep, passed, measured)
