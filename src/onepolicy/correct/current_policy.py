"""Corrections of the policy that is being trained: ratios, gates and centering in the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.correction import Weight
from onepolicy.correct.presets import check_config
from onepolicy.correct.report import Sums
from onepolicy.correct.reweight import count_left_out, fields_of
from onepolicy.correct.statistics import inside
from onepolicy.correct.weights import evaluate
from onepolicy.layout import Layout, restore_layout
from onepolicy.nonfinite import Nonfinite

Shape = TypeVar("Shape")

SMALLEST_TAIL = 1e-5
"""Smallest probability outside the head that counts.

Sums of float32 log-probabilities are known to 1e-6.
"""


class Live(NamedTuple, Generic[Shape]):
    """Weights and gates of one micro-batch under the policy that is being trained."""

    weight: Shape  # [T] float32, detached; 0 where not kept; multiply into the weight of `reweight`
    keep: Shape  # [T] bool; combine it with that of `reweight` by &
    centred: Shape  # [T] bool, where to subtract `centered_score`: kept, or out of weight bounds
    sums: Sums  # of this micro-batch; `combine` them over the step


@overload
def live_weights(
    logp_new: Tensor,
    logp_rollout: Tensor,
    mask: Tensor,
    config: CorrectionConfig,
    *,
    segment: Tensor | None = None,
    turn: Tensor | None = None,
    advantage: Tensor | None = None,
    nonfinite: Nonfinite = "skip",
) -> Live[Tensor]: ...
@overload
def live_weights(
    logp_new: Sequence[Tensor],
    logp_rollout: Sequence[Tensor],
    mask: Sequence[Tensor],
    config: CorrectionConfig,
    *,
    turn: Sequence[Tensor] | None = None,
    advantage: Sequence[Tensor] | None = None,
    nonfinite: Nonfinite = "skip",
) -> Live[list[Tensor]]: ...
@torch.no_grad()
def live_weights(
    logp_new: Layout,  # [T] float32, policy being trained, detached; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, trainable slots; the other slots may hold anything
    config: CorrectionConfig,  # `correction.live_part`
    *,
    segment: Layout | None = None,  # int64, sequence of each slot; [B, T] and lists need none
    turn: Layout | None = None,  # int64
    advantage: Layout | None = None,  # float32
    nonfinite: Nonfinite = "skip",  # reject slots whose values are not finite, or raise
) -> Live[Any]:
    """Return weights and gates of rho = exp(logp_new - logp_rollout) for one micro-batch.

    The micro-batch has whole samples. The loss is -weight * advantage * logp_new; weights carry no
    gradient. Denominators stay those of `reweight`. An empty mask gives empty sums. Raises
    UsageError if the config is not a `live_part`, if probabilities stand for their logarithms, or
    if a value is not finite and `nonfinite` is "raise".
    """
    check_config("live_weights", config)
    if config.ratio != "new/rollout":
        raise UsageError(
            f"live_weights: correction {config.name} is for reweight; give its `live_part`"
        )
    given = {"logp_new": logp_new, "logp_rollout": logp_rollout, "mask": mask}
    flat = fields_of("live_weights", given, segment=segment, turn=turn, advantage=advantage)
    count_left_out("live_weights", flat, "logp_new", nonfinite, mask)
    found = evaluate(config, flat)
    weight, keep, centred = (
        restore_layout(flat, mask) for flat in (found.weight, found.keep, found.passed)
    )
    return Live(weight, keep, centred, found.sums)


def centered_score(
    logp_head: Tensor,  # [n, H] float32, new policy, with its graph: the engine's H recorded tokens
    logp_head_rollout: Tensor,  # [n, H] float32, engine, of the whole vocabulary; may be -inf
    config: CorrectionConfig,
) -> Tensor:
    """Return [n], a value whose gradient is mu = E_q[f(rho) s], the rollout's mean weighted score.

    Score centering (arXiv 2609.20807) subtracts it: loss = -A (f(rho_a) log p_a - centered_score).
    f is the config's weight of the ratio, 1 if it has none. `centering = head` takes the rollout
    outside the head as proportional to the new policy: q = alpha p with alpha = (1 - Q_H) / (1 -
    P_H). Scores of the whole vocabulary add up to 0 under p, so the tail folds into the head: mu =
    sum_H [q f(p / q) - alpha f(1 / alpha) p] s. `centering = support` has no tail. A tail below
    SMALLEST_TAIL on either side is rounding and is left out.
    """
    p, q = logp_head.detach().double().exp(), logp_head_rollout.double().exp()
    coefficient = _mean_coefficient(p, q, config)
    if config.centering == "head":
        tail_p, tail_q = (1 - x.sum(-1, keepdim=True) for x in (p, q))
        alpha = tail_q / tail_p
        folded = alpha * _weight_of(1 / alpha, config.weight) * p
        coefficient -= torch.where(torch.minimum(tail_p, tail_q) > SMALLEST_TAIL, folded, 0.0)
    return _weighted_scores(coefficient, logp_head).sum(-1)


def centered_support_score(
    logp_kept: Tensor,  # [n] float32, new policy, with its graph: every token of m sets in turn
    logp_kept_rollout: Tensor,  # [n] float32, engine
    sizes: Tensor,  # [m] int64, tokens of each set
    config: CorrectionConfig,
) -> Tensor:
    """Return [m], as `centered_score` does, of sets that top-p, top-k or min-p kept.

    Both sides are distributions over the set, which has every token that the rollout may sample:
    there is no tail, and mu is exact.
    """
    p, q = logp_kept.detach().double().exp(), logp_kept_rollout.double().exp()
    terms = _weighted_scores(_mean_coefficient(p, q, config), logp_kept)
    return torch.segment_reduce(terms, "sum", lengths=sizes, unsafe=True)


def _mean_coefficient(p: Tensor, q: Tensor, config: CorrectionConfig) -> Tensor:
    return torch.where(q > 0, q * _weight_of(p / q, config.weight), 0.0)


def _weighted_scores(coefficient: Tensor, logp: Tensor) -> Tensor:
    scored = logp.masked_fill(logp == -math.inf, 0.0)  # probability 0 has no score
    return coefficient.to(logp.dtype) * scored


def _weight_of(rho: Tensor, weight: Weight) -> Tensor:
    if weight.level == "none":
        return torch.ones_like(rho)
    if weight.outside == "zero":
        return torch.where(inside(rho, weight.low, weight.high), rho, 0.0)
    if weight.bounded:
        return rho.clamp(weight.low, weight.high)
    return rho
