"""The trainable slots of a batch, packed. All correction maths runs on these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.layout import Layout, flatten_arguments, slot_index
from onepolicy.nonfinite import LeftOut, Nonfinite, apply_rule, refuse_probabilities

WEIGHT_LOG_RATIO_LIMIT = 80.0
"""Largest |log rho| of a slot or unit; larger ones are clamped. exp of it is finite in float32, and
it is far beyond any bound.
"""

CHUNK = 1 << 15
"""Slots in one chunk. It bounds the memory of a correction, whatever the size of the batch."""


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """n trainable slots in batch order.

    Values of the other slots are dropped before any arithmetic.
    """

    where: Tensor  # [n] int64, index of each slot in the batch
    size: int  # T, slots of the batch
    log_ratio: Tensor  # [n] float64, log(pi_trainer / pi_rollout), clamped; NaN if not finite
    logp_trainer: Tensor  # [n], numerator
    logp_rollout: Tensor  # [n], denominator
    segment: Tensor | None  # [n] int64, sequence of each slot
    turn: Tensor | None  # [n] int64, turn of each slot, from 0 in every sequence
    advantage: Tensor | None  # [n]
    sequences: int  # number of sequences
    turns: int = 1  # largest number of turns in a sequence
    units: int | None = None  # number of turns of all sequences, if `turn` numbers them together

    @property
    def count(self) -> int:
        """Number of trainable slots, n."""
        return len(self.log_ratio)

    def scatter(self, values: Tensor) -> Tensor:
        """Return [T] from [n], with 0 or False in the slots that are not trainable."""
        return values.new_zeros(self.size).index_copy_(0, self.where, values)


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
    UsageError if shapes differ, if an id is below 0 or not below the given number, or if a value is
    not finite and `nonfinite` is "raise".
    """
    given = Fields(logp_trainer, logp_rollout, mask, segment, turn, advantage)
    given.check()
    if nonfinite != "skip":
        given.left_out("slots", "logp_trainer", nonfinite, mask)
    if sequences is None:
        return _slots(*given.numbered())
    if turns is None:
        turns = max(1, given.extent("turn"))
    for name, limit in (("segment", sequences), ("turn", turns)):
        largest = given.extent(name) - 1
        if largest >= limit:
            raise UsageError(
                f"slots: the largest {name} is {largest}, but the argument {name}s is {limit}; "
                "ids count from 0"
            )
    return _slots(given, _Extent(sequences, turns))


class _Extent(NamedTuple):
    """Numbers of the whole batch, see `Slots`."""

    sequences: int
    turns: int
    units: int | None = None


def _slots(given: Fields, most: _Extent) -> Slots:
    where = given.mask.nonzero()[:, 0]
    trainer, rollout = given.logp_trainer.detach()[where], given.logp_rollout.detach()[where]
    log_ratio = trainer.double() - rollout.double()
    log_ratio = torch.where(log_ratio.isfinite(), log_ratio, torch.nan)
    log_ratio = log_ratio.clamp(-WEIGHT_LOG_RATIO_LIMIT, WEIGHT_LOG_RATIO_LIMIT)
    segment = turn = advantage = None
    if given.segment is not None:
        segment = given.segment[where].long()
    if given.turn is not None:
        turn = given.turn[where].long()
    if given.advantage is not None:
        advantage = given.advantage.detach()[where]
    size = given.mask.numel()
    return Slots(where, size, log_ratio, trainer, rollout, segment, turn, advantage, *most)


def any_layout(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a function of [T] fields so that it takes any layout.

    Its first three arguments are the two log-probabilities and the mask. Its `segment` is optional
    for [B, T] and lists, whose rows and items are the sequences. `nonfinite` is handed on as it is.
    """
    signature, name = inspect.signature(function), function.__name__

    @functools.wraps(function)
    def flat(*args: Any, **kwargs: Any) -> Result:
        bound = signature.bind(*args, **{"segment": None, **kwargs}).arguments
        options = {name: bound.pop(name) for name in ("nonfinite",) if name in bound}
        given = flatten_arguments(name, bound)
        fields = Fields.of(
            name, {field: bound[field] for field in list(bound)[:3]}, segment=bound["segment"]
        )
        if fields.segment is None:
            raise UsageError(
                f"{name}: [T] fields need `segment`, the sequence that each slot belongs to "
                "(torch.zeros(T).long() for one)"
            )
        numbered, _ = fields.numbered()
        return function(**{**given, "segment": numbered.segment}, **options)

    return flat


class Fields(NamedTuple):
    """A batch as the caller gives it, see `slots`."""

    logp_trainer: Tensor  # [T]
    logp_rollout: Tensor  # [T]
    mask: Tensor  # [T] bool
    segment: Tensor | None = None  # [T] int64
    turn: Tensor | None = None  # [T] int64
    advantage: Tensor | None = None  # [T]

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Layout], **more: Layout | None) -> Fields:
        """Flatten any layout.

        `given` holds trainer, rollout and mask, by the names of the public function's arguments.
        """
        flat = flatten_arguments(caller, {**given, **more})
        trainer, rollout, mask = (flat[name] for name in given)
        assert trainer is not None
        assert rollout is not None
        assert mask is not None
        return cls(
            trainer, rollout, mask, flat.get("segment"), flat.get("turn"), flat.get("advantage")
        )

    def left_out(self, caller: str, trainer: str, nonfinite: Nonfinite, like: Layout) -> LeftOut:
        """Count the slots whose values are not finite, by the rule of `apply_rule`.

        Raises UsageError for a side of probabilities in the place of their logarithms.
        Their log-ratio is NaN, so a correction rejects them. trainer, like: the trainer's side by
        the caller's name, and the mask in the caller's layout.
        """
        sides = {trainer: self.logp_trainer, "logp_rollout": self.logp_rollout}
        place = functools.partial(slot_index, like=like)
        kept, left = apply_rule(caller, nonfinite, self.mask, sides, place=place)
        refuse_probabilities(caller, kept, sides, place=place)
        return left

    def check(self) -> None:
        """Raise UsageError if shapes differ."""
        shape, mask = self.logp_trainer.shape, self.mask
        for name in ("logp_rollout", "segment", "turn", "advantage"):
            field = getattr(self, name)
            if field is not None and field.shape != shape:
                raise UsageError(
                    f"{name} has shape {list(field.shape)}, the trainer's {list(shape)}"
                )
        if mask.shape != shape or mask.dtype != torch.bool or mask.dim() != 1:
            raise UsageError(
                f"log-probabilities have shape {list(shape)}, the mask {list(mask.shape)} and "
                f"dtype {mask.dtype}; give one flat [T] each, and a bool mask"
            )

    def extent(self, name: str) -> int:
        """Return one more than the largest segment or turn on the mask; 0 if there is none.

        Raises UsageError if one is below 0.
        """
        ids = getattr(self, name)
        if ids is None or not len(ids):
            return 0
        chunks = [(ids[place], self.mask[place]) for place in _places(len(ids))]
        smallest = [torch.where(mask, some, 0).amin() for some, mask in chunks]
        if int(torch.stack(smallest).amin()) < 0:
            slot = int((self.mask & (ids < 0)).nonzero()[0, 0])
            raise UsageError(
                f"{name} is {int(ids[slot])} at slot {slot}, which the mask selects; ids count "
                f"from 0. Clear the mask there, or give the {name} that the slot belongs to"
            )
        largest = [torch.where(mask, some, -1).amax() for some, mask in chunks]
        return 1 + int(torch.stack(largest).amax())

    def numbered(self) -> Numbered:
        """Renumber sequences and turns with ids above the number of slots, and count them."""
        fields, limit = self, max(1, len(self.mask))
        sequences, turns = self.extent("segment"), max(1, self.extent("turn"))
        if sequences > limit:
            ids, sequences = _ranked(fields.segment, self.mask)
            fields = fields._replace(segment=ids)
        if turns > limit:
            ids, turns = _ranked(fields.turn, self.mask)
            fields = fields._replace(turn=ids)
        if fields.segment is None or fields.turn is None or sequences * turns <= limit:
            return Numbered(fields, _Extent(sequences, turns))
        ids, units = _ranked(fields.segment.long() * turns + fields.turn, self.mask)
        return Numbered(fields._replace(turn=ids), _Extent(sequences, turns, units))


class Numbered(NamedTuple):
    """A batch whose ids of sequences and turns are small enough to be indices."""

    fields: Fields
    most: _Extent

    def chunks(self) -> Iterator[tuple[slice, Slots]]:
        """Yield slices of CHUNK slots and their trainable slots. A sequence may span several."""
        trainer, rollout, mask, *more = self.fields
        for place in _places(len(mask)):
            rest = [field if field is None else field[place] for field in more]
            part = Fields(trainer[place], rollout[place], mask[place], *rest)
            yield place, _slots(part, self.most)


def _ranked(ids: Tensor | None, mask: Tensor) -> tuple[Tensor, int]:
    """Return [T] int64, the rank of each masked slot's id among all ids, and their number."""
    assert ids is not None
    found, index = ids[mask].unique(return_inverse=True)
    return torch.zeros_like(mask, dtype=torch.int64).masked_scatter_(mask, index), len(found)


def _places(size: int) -> Iterator[slice]:
    for start in range(0, max(size, 1), CHUNK):
        yield slice(start, min(start + CHUNK, size))
