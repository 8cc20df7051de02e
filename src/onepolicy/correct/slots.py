"""The trainable slots of a batch, packed. All correction maths runs on these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import UsageError

WEIGHT_LOG_RATIO_LIMIT = 80.0
"""Largest |log rho| of a slot or unit; larger ones are clamped. exp of it is finite in float32, and
it is far beyond any bound.
"""

CHUNK = 1 << 15
"""Slots in one chunk. It bounds the memory of a correction, whatever the size of the batch."""


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


class Extent(NamedTuple):
    """Numbers of the whole batch, see `Slots`."""

    sequences: int
    turns: int
    units: int | None = None


def trainable_slots(given: Fields, most: Extent) -> Slots:
    """Return the slots of the mask. most: of the whole batch."""
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


class Fields(NamedTuple):
    """The fields of a batch that a correction reads."""

    logp_trainer: Tensor  # [T]
    logp_rollout: Tensor  # [T]
    mask: Tensor  # [T] bool
    segment: Tensor | None = None  # [T] int64
    turn: Tensor | None = None  # [T] int64
    advantage: Tensor | None = None  # [T]

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
            return Numbered(fields, Extent(sequences, turns))
        ids, units = _ranked(fields.segment.long() * turns + fields.turn, self.mask)
        return Numbered(fields._replace(turn=ids), Extent(sequences, turns, units))


class Numbered(NamedTuple):
    """A batch whose ids of sequences and turns are small enough to be indices."""

    fields: Fields
    most: Extent

    def chunks(self) -> Iterator[tuple[slice, Slots]]:
        """Yield slices of CHUNK slots and their trainable slots. A sequence may span several."""
        trainer, rollout, mask, *more = self.fields
        for place in _places(len(mask)):
            rest = [field if field is None else field[place] for field in more]
            part = Fields(trainer[place], rollout[place], mask[place], *rest)
            yield place, trainable_slots(part, self.most)


def _ranked(ids: Tensor | None, mask: Tensor) -> tuple[Tensor, int]:
    """Return [T] int64, the rank of each masked slot's id among all ids, and their number."""
    assert ids is not None
    found, index = ids[mask].unique(return_inverse=True)
    return torch.zeros_like(mask, dtype=torch.int64).masked_scatter_(mask, index), len(found)


def _places(size: int) -> Iterator[slice]:
    for start in range(0, max(size, 1), CHUNK):
        yield slice(start, min(start + CHUNK, size))
