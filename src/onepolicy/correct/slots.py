"""The trainable slots of a batch, packed: all correction math runs on these. Edges pad, flatten and restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import UsageError

LOG_RATIO_LIMIT = 80.0
"""|log rho| of a slot or unit beyond this is taken as this: exp stays finite in float32, far above any bound."""

CHUNK = 1 << 15
"""Slots that are worked on at once, so that what a correction holds at a time does not grow with the batch."""

Layout = Tensor | Sequence[Tensor]
"""[T] packed, [B, T] padded on either side, or one [T_i] per sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """n trainable slots in batch order. What stood in the other slots is gone before any arithmetic."""

    where: Tensor  # [n] int64, index of each among the size slots of the batch
    size: int  # T
    log_ratio: Tensor  # [n] float64, log(pi_trainer / pi_rollout), clamped; NaN where it is not finite
    logp_trainer: Tensor  # [n], numerator
    logp_rollout: Tensor  # [n], denominator
    segment: Tensor | None  # [n] int64, sequence of each slot
    turn: Tensor | None  # [n] int64, turn of each slot, from 0 in every sequence
    advantage: Tensor | None  # [n]
    sequences: int  # rows of everything that is per sequence
    turns: int = 1  # at most so many turns in a sequence

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
    """Pick the trainable slots. Raises UsageError if shapes differ."""
    Fields(logp_trainer, logp_rollout, mask, segment, turn, advantage).check()
    where = mask.nonzero()[:, 0]
    trainer, rollout = logp_trainer.detach()[where], logp_rollout.detach()[where]
    log_ratio = trainer.double() - rollout.double()
    log_ratio = torch.where(log_ratio.isfinite(), log_ratio, torch.nan).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ids = None if segment is None else segment[where].long()
    if sequences is None:
        sequences = int(ids.max()) + 1 if ids is not None and len(ids) else 0
    turn = None if turn is None else turn[where].long()
    if turns is None:
        turns = int(turn.max()) + 1 if turn is not None and len(turn) else 1
    return Slots(
        where,
        mask.numel(),
        log_ratio,
        trainer,
        rollout,
        ids,
        turn,
        None if advantage is None else advantage.detach()[where],
        sequences,
        turns,
    )


class Fields(NamedTuple):
    """A batch as it is given, see `slots`."""

    logp_trainer: Tensor  # [T]
    logp_rollout: Tensor  # [T]
    mask: Tensor  # [T] bool
    segment: Tensor | None = None  # [T] int64
    turn: Tensor | None = None  # [T] int64
    advantage: Tensor | None = None  # [T]

    def check(self) -> None:
        """Raises UsageError if shapes differ."""
        shape, mask = self.logp_trainer.shape, self.mask
        for name in ("logp_rollout", "segment", "turn", "advantage"):
            field = getattr(self, name)
            if field is not None and field.shape != shape:
                raise UsageError(f"{name} has shape {list(field.shape)}, the trainer's {list(shape)}")
        if mask.shape != shape or mask.dtype != torch.bool or mask.dim() != 1:
            raise UsageError(
                f"log-probabilities {list(shape)} and mask {list(mask.shape)} {mask.dtype} must have one shape, the "
                "mask bool"
            )

    def chunks(self) -> Iterator[tuple[slice, Slots]]:
        """The trainable slots of CHUNK slots at a time, and where those lie. A sequence may span several."""
        self.check()
        sequences, turns = _extent(self.segment, self.mask), _extent(self.turn, self.mask)
        for place in _places(len(self.mask)):
            trainer, rollout, mask = self.logp_trainer[place], self.logp_rollout[place], self.mask[place]
            segment, turn, advantage = (None if x is None else x[place] for x in self[3:])
            more = {"segment": segment, "turn": turn, "advantage": advantage}
            yield place, slots(trainer, rollout, mask, **more, sequences=sequences, turns=max(1, turns))


def _places(size: int) -> Iterator[slice]:
    for start in range(0, max(size, 1), CHUNK):
        yield slice(start, min(start + CHUNK, size))


def _extent(ids: Tensor | None, mask: Tensor) -> int:
    """One more than the largest id on the mask; 0 without any."""
    if ids is None or not len(ids):
        return 0
    return 1 + int(torch.stack([torch.where(mask[p], ids[p], -1).amax() for p in _places(len(mask))]).amax())


def flatten(values: Layout) -> Tensor:
    """Any layout -> [T]."""
    return values.reshape(-1) if isinstance(values, Tensor) else torch.cat(list(values))


def rows(values: Layout) -> Tensor | None:
    """The sequence of each flat slot, where the layout itself says so: rows of [B, T], items of a list."""
    if not isinstance(values, Tensor):
        lengths = torch.tensor([len(v) for v in values])
        return torch.arange(len(values)).repeat_interleave(lengths).to(values[0].device)
    if values.dim() == 2:
        return torch.arange(len(values), device=values.device).repeat_interleave(values.shape[1])
    return None


def restore(flat: Tensor, like: Layout) -> Layout:
    """[T] -> the layout it came from."""
    if isinstance(like, Tensor):
        return flat.reshape(like.shape)
    return list(flat.split([len(v) for v in like]))
