"""What needs the policy that is being trained: ratios, gates and score centering, evaluated in the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import Weight
from onepolicy.correct.receipt import Sums
from onepolicy.correct.slots import slots
from onepolicy.correct.statistics import inside
from onepolicy.correct.weights import partials


class Live(NamedTuple):
    weight: Tensor  # [T] float32, detached; 0 where not kept; multiply into the weight of `reweight`
    keep: Tensor  # [T] bool, and it with that of `reweight`
    sums: Sums  # of this micro-batch: `combine` over the step, then `report(config.live_part, ...)`


@torch.no_grad()
def live_weights(
    logp_new: Tensor,  # [T] float32, the policy being trained; its graph is not used
    logp_rollout: Tensor,  # [T] float32
    mask: Tensor,  # [T] bool, trainable slots; the other slots may hold anything
    config: CorrectionConfig,  # `correction.live_part`
    *,
    segment: Tensor | None = None,  # [T] int64, sequence of each slot; samples are whole in a micro-batch
    turn: Tensor | None = None,  # [T] int64
    advantage: Tensor | None = None,  # [T] float32
) -> Live:
    """Weights and gates of rho = exp(logp_new - logp_rollout) for one micro-batch of whole samples.

    With weights, the loss is -weight * advantage * logp_new (they carry no gradient). Denominators stay the driver's.
    An empty mask gives empty sums. Raises UsageError if the config is not a `live_part`.
    """
    if config.ratio != "new/rollout":
        raise UsageError(f"live_weights: correction {config.name} is for reweight; give its `live_part`")
    part = partials(config, slots(logp_new, logp_rollout, mask, segment=segment, turn=turn, advantage=advantage))
    return Live(part.slots.scatter(part.weight.float()), part.slots.scatter(part.keep), part.sums)


def centered_score(
    logp_head: Tensor,  # [n, H] float32, new policy, carries the graph: the sampler's H recorded tokens
    logp_head_rollout: Tensor,  # [n, H] float32, rollout engine, normalised over the whole vocabulary
    config: CorrectionConfig,
) -> Tensor:
    """[n]: a value whose gradient is mu = E_q[f(rho) s], the mean weighted score of the rollout policy.

    Score centering (arXiv 2609.20807) subtracts it: loss = -A (f(rho_a) log p_a - centered_score), f the config's
    weight of the ratio (1 without one). centering = head: outside the head the rollout is taken as proportional to the
    new policy, q = alpha p with alpha = (1 - Q_H) / (1 - P_H). Scores of a whole vocabulary add up to 0 under p, so the
    tail's share folds into the head: mu = sum_H [q f(p / q) - alpha f(1 / alpha) p] s. support: there is no tail.
    """
    p, q = logp_head.detach().double().exp(), logp_head_rollout.double().exp()
    coefficient = q * _weight_of(p / q, config.weight)
    if config.centering == "head":
        alpha = (1 - q.sum(-1, keepdim=True)).clamp(min=0) / (1 - p.sum(-1, keepdim=True)).clamp(min=1e-12)
        coefficient = coefficient - alpha * _weight_of(1 / alpha.clamp(min=1e-12), config.weight) * p
    return (coefficient.to(logp_head.dtype) * logp_head).sum(-1)


def _weight_of(rho: Tensor, weight: Weight) -> Tensor:
    if weight.level == "none":
        return torch.ones_like(rho)
    if weight.rejects:
        return torch.where(inside(rho, weight.low, weight.high), rho, 0.0)
    return rho.clamp(weight.low, weight.high) if weight.bounded else rho
