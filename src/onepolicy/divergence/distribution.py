"""Distances between two engines' distributions at each slot, from the rollout's likeliest tokens.

One sampled token does not show the rest of the distribution. Outside the listed tokens only the
whole mass of both engines is known, so a distance over the vocabulary is a bound. It is exact if
the whole vocabulary is listed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Mass outside the listed tokens that is rounding of float32 log-probabilities in a sum."""


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """Distances at n slots. p: trainer, q: rollout, H: the rollout's k likeliest tokens."""

    top: int  # k
    tv_low: Tensor  # [n] float64, lower bound of the total variation sum |p - q| / 2
    tv_high: Tensor  # [n] float64, its upper bound
    kl_low: Tensor  # [n] float64, nats: lower bound of KL(q || p); tokens outside H count as one
    kl_shared: Tensor  # [n] float64, nats: KL(q || p), both conditioned on the token being in H
    argmax_differs: Tensor  # [n] bool: the engines' likeliest tokens differ (ties: no)
    overlap: Tensor  # [n] float64: share of what q can draw of H among the trainer's k likeliest
    mass_rollout: Tensor  # [n] float64, of H
    mass_trainer: Tensor  # [n] float64, of H

    def metrics(self) -> dict[str, float]:
        """Return means over all slots, and the largest bounds of the total variation."""
        means = {
            "tv_low": self.tv_low,
            "tv_high": self.tv_high,
            "kl_low": self.kl_low,
            "kl_shared": self.kl_shared,
            "argmax_differs": self.argmax_differs.double(),
            "overlap": self.overlap,
            "mass_rollout": self.mass_rollout,
            "mass_trainer": self.mass_trainer,
        }
        numbers = {name: values.mean() for name, values in means.items()}
        numbers |= {"tv_low_max": self.tv_low.max(), "tv_high_max": self.tv_high.max()}
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))

    def above(self, edges: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return lower and upper bounds of the share of slots that vary more than each edge."""
        at = torch.tensor(edges, dtype=torch.float64)
        low, high = (
            (values[:, None] > at).double().mean(0).tolist()
            for values in (self.tv_low, self.tv_high)
        )
        return low, high


def distances(
    ids: Tensor,  # [n, k] int, the rollout's likeliest tokens, likeliest first
    logp_rollout: Tensor,  # [n, k] float32, of these; -inf where sampling leaves fewer than k
    logp_trainer: Tensor,  # [n, k] float32, of the same tokens
    trainer_ids: Tensor,  # [n, k] int, the trainer's likeliest tokens, likeliest first
    trainer_logp: Tensor,  # [n, k] float32, of those, trainer
) -> Distances:
    """Return the distances at n slots.

    All log-probabilities are normalised over the whole vocabulary at the sampling temperature.
    """
    p, q = logp_trainer.double().exp(), logp_rollout.double().exp()
    inside = (p - q).abs().sum(-1) / 2
    p_in, q_in = p.sum(-1), q.sum(-1)
    p_out, q_out = (torch.where(1 - mass > ROUNDING, 1 - mass, 0.0) for mass in (p_in, q_in))
    log_ratio = torch.where(q > 0, logp_rollout.double() - logp_trainer.double(), 0.0)
    kl_shared = ((q * log_ratio).sum(-1) / q_in - (q_in / p_in).log()).clamp(min=0)
    return Distances(
        top=ids.shape[1],
        tv_low=inside + (p_out - q_out).abs() / 2,  # outside H, at best all of one sign
        tv_high=inside + (p_out + q_out) / 2,  # at worst of no token in common
        kl_low=q_in * kl_shared + _bernoulli_kl(q_out, p_out),
        kl_shared=kl_shared,
        argmax_differs=_argmax_differs(ids, logp_rollout, logp_trainer, trainer_ids, trainer_logp),
        overlap=_overlap(ids, logp_rollout, trainer_ids),
        mass_rollout=q_in,
        mass_trainer=p_in,
    )


def _bernoulli_kl(q: Tensor, p: Tensor) -> Tensor:
    q, p = (x.clamp(ROUNDING, 1 - ROUNDING) for x in (q, p))
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def _argmax_differs(
    ids: Tensor,
    logp_rollout: Tensor,
    logp_trainer: Tensor,
    trainer_ids: Tensor,
    trainer_logp: Tensor,
) -> Tensor:
    """Return where the likeliest tokens differ.

    Each engine must find its own likeliest token strictly likelier than that of the other. bfloat16
    logits tie often, and the order among equals is no difference.
    """
    is_trainers_best = ids == trainer_ids[:, :1]
    of_trainers_best = torch.where(is_trainers_best, logp_rollout, -math.inf).amax(-1)
    return (logp_rollout[:, 0] > of_trainers_best) & (trainer_logp[:, 0] > logp_trainer[:, 0])


def _overlap(ids: Tensor, logp_rollout: Tensor, trainer_ids: Tensor) -> Tensor:
    """Return the share of the listed tokens that the rollout can draw among the trainer's."""
    size = 1 + int(torch.maximum(ids.max(), trainer_ids.max()))
    row = size * torch.arange(len(ids), device=ids.device)[:, None]
    drawn = logp_rollout > -math.inf
    shared = torch.isin(row + ids, row + trainer_ids) & drawn
    return shared.sum(-1).double() / drawn.sum(-1)
