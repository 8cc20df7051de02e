"""How far apart the two engines' distributions are at each position, from the rollout's n likeliest tokens.

What one sampled token cannot show: the rest of the distribution. Outside the n tokens only both engines' whole mass is
known, so a distance over the vocabulary comes as a bound, which is exact where n is the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-6
"""Mass outside the n tokens below this is what float32 log-probabilities miss when they are added up."""


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """p: trainer, q: rollout, H: the rollout's k likeliest tokens, of each of n positions."""

    top: int  # k
    tv_low: (
        Tensor  # [n] float64: total variation sum |p - q| / 2 over the vocabulary is at least this
    )
    tv_high: Tensor  # [n] float64: and at most this
    kl_low: Tensor  # [n] float64, nats: KL(q || p) with all tokens outside H as one; the whole KL is at least this
    kl_shared: (
        Tensor  # [n] float64, nats: KL(q || p) of both distributions given that the token is in H
    )
    argmax_differs: Tensor  # [n] bool: each engine finds its own likeliest token likelier than the other's (ties: no)
    overlap: Tensor  # [n] float64: share of H among the trainer's own k likeliest tokens
    mass_rollout: Tensor  # [n] float64, of H
    mass_trainer: Tensor  # [n] float64, of H

    def metrics(self) -> dict[str, float]:
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
        """Share of positions whose total variation is more than each edge: at least, at most."""
        at = torch.tensor(edges, dtype=torch.float64)
        low, high = (
            (values[:, None] > at).double().mean(0).tolist()
            for values in (self.tv_low, self.tv_high)
        )
        return low, high


def distances(
    ids: Tensor,  # [n, k] int, the rollout's likeliest tokens, likeliest first
    logp_rollout: Tensor,  # [n, k] float32, of them; -inf where narrowed sampling leaves fewer than k
    logp_trainer: Tensor,  # [n, k] float32, of the same tokens
    own_ids: Tensor,  # [n, k] int, the trainer's likeliest tokens, likeliest first
    own_logp: Tensor,  # [n, k] float32, of those, trainer
) -> Distances:
    """Both log-probabilities are normalised over the whole vocabulary, at the temperature that was sampled with."""
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
        argmax_differs=_argmax_differs(ids, logp_rollout, logp_trainer, own_ids, own_logp),
        overlap=_overlap(ids, own_ids),
        mass_rollout=q_in,
        mass_trainer=p_in,
    )


def _bernoulli_kl(q: Tensor, p: Tensor) -> Tensor:
    q, p = (x.clamp(ROUNDING, 1 - ROUNDING) for x in (q, p))
    return q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()


def _argmax_differs(
    ids: Tensor, logp_rollout: Tensor, logp_trainer: Tensor, own_ids: Tensor, own_logp: Tensor
) -> Tensor:
    """bfloat16 logits tie often: whichever of equals an engine names first, that is no difference."""
    own = ids == own_ids[:, :1]
    of_own = torch.where(own, logp_rollout, -math.inf).amax(
        -1
    )  # of the trainer's best; less likely if not listed
    return (logp_rollout[:, 0] > of_own) & (own_logp[:, 0] > logp_trainer[:, 0])


def _overlap(ids: Tensor, own_ids: Tensor) -> Tensor:
    size = 1 + int(torch.maximum(ids.max(), own_ids.max()))
    row = size * torch.arange(len(ids), device=ids.device)[:, None]
    return torch.isin(row + ids, row + own_ids).double().mean(-1)
