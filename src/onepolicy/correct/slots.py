"""The trainable slots of a batch, packed: all correction math runs on these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.layout import Layout, arguments

LOG_RATIO_LIMIT = 80.0
"""|log rho| of a slot or unit beyond this is taken as this: exp stays finite in float32, far above any bound."""

CHUNK = 1 << 15
"""Slots that are worked on at once, so that what a correction holds at a time does not grow with the batch."""


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """n trainable slots in batch order. What stood in the other slots is gone before any arithmetic."""

    where: Tensor  # [n] int64, index of each among the size slots of the batch
    size: int  # T
    log_ratio: (
        Tensor  # [n] float64, log(pi_trainer / pi_rollout), clamped; NaN where it is not finite
    )
    logp_trainer: Tensor  # [n], numerator
    logp_rollout: Tensor  # [n], denominator
    segment: Tensor | None  # [n] int64, sequence of each slot
    turn: Tensor | None  # [n] int64, turn of each slot, from 0 in every sequence
    advantage: Tensor | None  # [n]
    sequences: int  # rows of everything that is per sequence
    turns: int = 1  # at most so many turns in a sequence
    units: int | None = None  # if known, `turn` numbers so many turns of all sequences together

    @property
    def count(self) -> int:
        return len(self.log_ratio)

    def scatter(self, values: Tensor) -> Tensor:
        """[n] -> [T]; 0 or False in the slots that are not trainable."""
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
) -> Slots:
    """Return the trainable slots. UsageError if shapes differ, or if an id is below 0 or not below what was given.

    Without `sequences` the ids are numbers of this part alone, and may be large: nothing grows with them.
    """
    given = Fields(logp_trainer, logp_rollout, mask, segment, turn, advantage)
    given.check()
    if sequences is None:
        return _slots(*given.numbered())
    if turns is None:
        turns = max(1, given.extent("turn"))
    for name, limit in (("segment", sequences), ("turn", turns)):
        largest = given.extent(name) - 1
        if largest >= limit:
            raise UsageError(
                f"slots: the largest {name} is {largest}, but the batch was said to have {limit}; they count from 0"
            )
    return _slots(given, _Extent(sequences, turns))


class _Extent(NamedTuple):
    """Of the whole batch, see `Slots`."""

    sequences: int
    turns: int
    units: int | None = None


def _slots(given: Fields, most: _Extent) -> Slots:
    where = given.mask.nonzero()[:, 0]
    trainer, rollout = given.logp_trainer.detach()[where], given.logp_rollout.detach()[where]
    log_ratio = trainer.double() - rollout.double()
    log_ratio = torch.where(log_ratio.isfinite(), log_ratio, torch.nan).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    return Slots(
        where,
        given.mask.numel(),
        log_ratio,
        trainer,
        rollout,
        None if given.segment is None else given.segment[where].long(),
        None if given.turn is None else given.turn[where].long(),
        None if given.advantage is None else given.advantage.detach()[where],
        *most,
    )


def any_layout(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let a function of [T] fields be called with any layout: the first three are both sides and the mask, and its
    `segment`, which it needs, may come from the rows of [B, T] or the items of a list."""
    signature, name = inspect.signature(function), function.__name__

    @functools.wraps(function)
    def flat(*args: Any, **kwargs: Any) -> Result:
        bound = signature.bind(*args, **{"segment": None, **kwargs}).arguments
        given = arguments(name, bound)
        fields = Fields.of(
            name, {field: bound[field] for field in list(bound)[:3]}, segment=bound["segment"]
        )
        if fields.segment is None:
            raise UsageError(
                f"{name}: [T] fields need the `segment` of each slot, the sequence that it belongs to"
            )
        numbered, _ = fields.numbered()
        return function(**{**given, "segment": numbered.segment})

    return flat


class Fields(NamedTuple):
    """A batch as it is given, see `slots`."""

    logp_trainer: Tensor  # [T]
    logp_rollout: Tensor  # [T]
    mask: Tensor  # [T] bool
    segment: Tensor | None = None  # [T] int64
    turn: Tensor | None = None  # [T] int64
    advantage: Tensor | None = None  # [T]

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Layout], **more: Layout | None) -> Fields:
        """From any layout. given: trainer, rollout and mask, under the names that the caller's user knows."""
        flat = arguments(caller, {**given, **more})
        trainer, rollout, mask = (flat[name] for name in given)
        assert trainer is not None
        assert rollout is not None
        assert mask is not None
        return cls(
            trainer, rollout, mask, flat.get("segment"), flat.get("turn"), flat.get("advantage")
        )

    def check(self) -> None:
        """Raises UsageError if shapes differ."""
        shape, mask = self.logp_trainer.shape, self.mask
        for name in ("logp_rollout", "segment", "turn", "advantage"):
            field = getattr(self, name)
            if field is not None and field.shape != shape:
                raise UsageError(
                    f"{name} has shape {list(field.shape)}, the trainer's {list(shape)}"
                )
        if mask.shape != shape or mask.dtype != torch.bool or mask.dim() != 1:
            raise UsageError(
                f"log-probabilities {list(shape)} and mask {list(mask.shape)} {mask.dtype} must have one shape, the "
                "mask bool"
            )

    def extent(self, name: str) -> int:
        """One more than the largest segment or turn on the mask; 0 without any. UsageError if one is below 0."""
        ids = getattr(self, name)
        if ids is None or not len(ids):
            return 0
        parts = [(ids[p], self.mask[p]) for p in _places(len(ids))]
        if int(torch.stack([torch.where(mask, own, 0).amin() for own, mask in parts]).amin()) < 0:
            slot = int((self.mask & (ids < 0)).nonzero()[0, 0])
            raise UsageError(
                f"{name} is {int(ids[slot])} at slot {slot}, which the mask selects; they count from 0. Clear the mask "
                f"there, or say which {name} the slot belongs to"
            )
        return 1 + int(
            torch.stack([torch.where(mask, own, -1).amax() for own, mask in parts]).amax()
        )

    def numbered(self) -> tuple[Fields, _Extent]:
        """With sequences, and turns, numbered anew if their ids reach further than there are slots."""
        fields, limit = self, max(1, len(self.mask))
        sequences, turns = self.extent("segment"), max(1, self.extent("turn"))
        if sequences > limit:
            ids, sequences = _ranked(fields.segment, self.mask)
            fields = fields._replace(segment=ids)
        if turns > limit:
            ids, turns = _ranked(fields.turn, self.mask)
            fields = fields._replace(turn=ids)
        if fields.segment is None or fields.turn is None or sequences * turns <= limit:
            return fields, _Extent(sequences, turns)
        ids, units = _ranked(fields.segment.long() * turns + fields.turn, self.mask)
        return fields._replace(turn=ids), _Extent(sequences, turns, units)

    def chunks(self) -> Iterator[tuple[slice, Slots]]:
        """The trainable slots of CHUNK slots at a time, and where those lie. A sequence may span several."""
        self.check()
        numbered, most = self.numbered()
        trainer, rollout, mask, *more = numbered
        for place in _places(len(self.mask)):
            rest = (None if x is None else x[place] for x in more)
            yield place, _slots(Fields(trainer[place], rollout[place], mask[place], *rest), most)


def _ranked(ids: Tensor | None, mask: Tensor) -> tuple[Tensor, int]:
    """[T] int64: each masked slot's id among all that occur, in order; and how many do."""
    assert ids is not None
    found, index = ids[mask].unique(return_inverse=True)
    return torch.zeros_like(mask, dtype=torch.int64).masked_scatter_(mask, index), len(found)


def _places(size: int) -> Iterator[slice]:
    for start in range(0, max(size, 1), CHUNK):
        yield slice(start, min(start + CHUNK, size))
