"""The correction as a library: arguments are checked, then `weights.py` computes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args, overload

import torch
from torch import Tensor

from onepolicy.arguments import Kind, require_one_device, require_tensor
from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.correct.presets import check_config
from onepolicy.correct.report import Sums
from onepolicy.correct.slots import Extent, Fields, Slots, trainable_slots
from onepolicy.correct.statistics import Units, unit_sums
from onepolicy.correct.weights import (
    Average,
    Partial,
    checked_report,
    evaluate_part,
    has_budget,
    weigh,
)
from onepolicy.layout import IDS, Layout, flatten_arguments, restore_layout, slot_index
from onepolicy.nonfinite import LeftOut, Nonfinite, apply_rule, refuse_probabilities

Shape = TypeVar("Shape")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Applied(Generic[Shape]):
    """Weights for the loss: sum(keep * weight * surrogate) / denominator."""

    weight: Shape  # [T] float32, detached; 0 where not kept
    keep: Shape  # [T] bool, the mask minus rejected slots
    denominator: int  # slots of the original mask: rejecting some never makes the others louder
    report: dict[str, float]
    nonfinite: LeftOut  # slots rejected because a log-probability is not finite


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
    flat = fields_of("reweight", given, segment=segment, turn=turn, advantage=advantage)
    count = int(flat.mask.sum())
    if not count:
        raise UsageError(
            f"reweight: the mask selects none of {len(flat.mask)} slots; there is nothing to "
            "train on"
        )
    left = count_left_out("reweight", flat, "logp_old", nonfinite, mask)
    weight, keep, numbers = weigh(config, flat, average=average)
    return Applied(restore_layout(weight, mask), restore_layout(keep, mask), count, numbers, left)


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
    if has_budget(config):
        raise UsageError(
            "partials: a budget gate ranks all slots of the step against each other; use reweight"
        )
    if units is None:
        units = unit_sums(config, slots)
    return evaluate_part(config, slots, units, {}, average)


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
    numbers = checked_report(config, total)
    weight = (part.weight * total.scale(config)).float()
    return part.slots.scatter(weight), part.slots.scatter(part.keep), numbers


def _check_average(caller: str, average: object) -> None:
    if average not in get_args(Average):
        expected = " or ".join(map(repr, get_args(Average)))
        raise UsageError(f"{caller}: average is {average!r}, expected {expected}")


def slots(
    logp_trainer: Tensor,  # [T], trainer: before the update, or the one being trained
    logp_rollout: Tensor,  # [T], rollout engine
    mask: Tensor,  # [T] bool, trainable slots; the other slots may hold anything
    *,
    segment: Tensor | None = None,  # [T] int64, sequence of each slot, from 0
    turn: Tensor | None = None,  # [T] int64, turn of each slot
    advantage: Tensor | None = None,  # [T]
    sequences: int | None = None,  # in the whole batch, if these slots are only a chunk of it
    turns: int | None = None,  # most turns of a sequence in the whole batch, likewise
    nonfinite: Nonfinite = "skip",  # reject slots whose values are not finite, or raise
) -> Slots:
    """Return the trainable slots.

    Without `sequences` the ids may be any numbers from 0 on; memory does not grow with them. Raises
    UsageError if shapes differ, if an id is below 0 or not below the given number, if probabilities
    stand for their logarithms, or if a value is not finite and `nonfinite` is "raise".
    """
    given = Fields(logp_trainer, logp_rollout, mask, segment, turn, advantage)
    _check_fields(given)
    count_left_out("slots", given, "logp_trainer", nonfinite, mask)
    if sequences is None:
        return trainable_slots(*given.numbered())
    if turns is None:
        turns = max(1, given.extent("turn"))
    for name, limit in (("segment", sequences), ("turn", turns)):
        largest = given.extent(name) - 1
        if largest >= limit:
            raise UsageError(
                f"slots: the largest {name} is {largest}, but the argument {name}s is {limit}; "
                "ids count from 0"
            )
    return trainable_slots(given, Extent(sequences, turns))


def fields_of(caller: str, given: Mapping[str, Layout], **more: Layout | None) -> Fields:
    """Flatten any layout.

    `given` holds trainer, rollout and mask, by the names of the public function's arguments.
    """
    flat = flatten_arguments(caller, {**given, **more})
    trainer, rollout, mask = (flat[name] for name in given)
    assert trainer is not None
    assert rollout is not None
    assert mask is not None
    return Fields(
        trainer, rollout, mask, flat.get("segment"), flat.get("turn"), flat.get("advantage")
    )


def count_left_out(
    caller: str, fields: Fields, trainer: str, nonfinite: Nonfinite, like: Layout
) -> LeftOut:
    """Count the slots whose values are not finite, by the rule of `apply_rule`.

    Raises UsageError for a side of probabilities in the place of their logarithms.
    Their log-ratio is NaN, so a correction rejects them. trainer, like: the trainer's side by
    the caller's name, and the mask in the caller's layout.
    """
    sides = {trainer: fields.logp_trainer, "logp_rollout": fields.logp_rollout}
    place = functools.partial(slot_index, like=like)
    kept, left = apply_rule(caller, nonfinite, fields.mask, sides, place=place)
    refuse_probabilities(caller, kept, sides, place=place)
    return left


OPTIONAL = ("segment", "turn", "advantage")


def _check_fields(fields: Fields) -> None:
    """Raise UsageError for other things than plain tensors of one shape."""
    for name, field in fields._asdict().items():
        if field is None and name in OPTIONAL:
            continue
        kind: Kind = "numbers"
        if name in IDS:
            kind = "whole numbers"
        elif name == "mask":
            kind = "bool"
        require_tensor("slots", name, field, kind)
    require_one_device("slots", fields._asdict())
    shape, mask = fields.logp_trainer.shape, fields.mask
    for name in ("logp_rollout", *OPTIONAL):
        field = getattr(fields, name)
        if field is not None and field.shape != shape:
            raise UsageError(f"{name} has shape {list(field.shape)}, the trainer's {list(shape)}")
    if mask.shape != shape or mask.dim() != 1:
        raise UsageError(
            f"log-probabilities have shape {list(shape)}, the mask {list(mask.shape)}; give one "
            "flat [T] each"
        )


def any_layout(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function of [T] fields so that it takes any layout.

    Its first three arguments are the two log-probabilities and the mask. Without `segment` the rows
    of [B, T] and the items of a list are the sequences, and [T] is one. `nonfinite` is handed on.
    """
    signature, name = inspect.signature(function), function.__name__

    @functools.wraps(function)
    def flat(*args: Any, **kwargs: Any) -> Result:
        bound = signature.bind(*args, **{"segment": None, **kwargs}).arguments
        options = {name: bound.pop(name) for name in ("nonfinite",) if name in bound}
        given = flatten_arguments(name, bound)
        fields = fields_of(
            name, {field: bound[field] for field in list(bound)[:3]}, segment=bound["segment"]
        )
        segment = fields.numbered()[0].segment
        if segment is None:
            segment = torch.zeros_like(fields.mask, dtype=torch.int64)
        return function(**{**given, "segment": segment}, **options)

    return flat
