"""The trainable slots of a batch, packed: all correction math runs on these. Edges pad, flatten and restore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import UsageError

LOG_RATIO_LIMIT = 80.0
"""|log rho| of a slot or unit beyond this is taken as this: exp stays finite in float32, far above any bound."""

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
    for name, field in {"logp_rollout": logp_rollout, "segment": segment, "turn": turn, "advantage": advantage}.items():
        if field is not None and field.shape != logp_trainer.shape:
            raise UsageError(f"{name} has shape {list(field.shape)}, the trainer's {list(logp_trainer.shape)}")
    if mask.shape != logp_trainer.shape or mask.dtype != torch.bool or mask.dim() != 1:
        raise UsageError(
            f"log-probabilities {list(logp_trainer.shape)} and mask {list(mask.shape)} {mask.dtype} must have one "
            "shape, the mask bool"
        )
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
