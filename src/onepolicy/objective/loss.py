"""Slots -> the scalar that is differentiated."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.config.correction import TERMS, Term
from onepolicy.objective.surrogate import kl_loss, surrogate
from onepolicy.types import TokenBatch


def loss_weights(batch: TokenBatch, config: ObjectiveConfig, *, max_tokens: int) -> Tensor:
    """[T] float32, `loss_weight`: the loss is sum(loss_weight * keep * weight * surrogate). 0 outside the trainable slots.

    `batch` is the whole optimiser step, so that any split into micro-batches adds up to the same loss and gradient.
    With N slots, S samples of T_i slots, P prompts of T_p slots, R episodes of T_r slots (an episode whose history was
    rewritten has several samples): token-mean 1 / N; prompt-mean 1 / (P T_p); episode-mean 1 / (R T_r);
    sequence-mean-token-mean 1 / (S T_i); sequence-mean-token-sum 1 / S; sequence-mean-token-constant 1 / (S L) with
    L = reduction_length or `max_tokens` (Dr. GRPO). Counts are of the mask before any rejection.
    Raises UsageError if there is no trainable slot.
    """
    mask = batch.trainable.double()
    if not batch.trainable.any():
        raise UsageError("the step has no trainable slot to divide by")
    samples = batch.num_samples
    match config.reduction:
        case "token-mean":
            loss_weight = mask / mask.sum()
        case "prompt-mean":
            loss_weight = _mean_of_means(mask, batch.group[:, None], batch.segment)
        case "episode-mean":
            own = (
                torch.arange(samples, device=mask.device)
                if batch.episode is None
                else batch.episode
            )
            loss_weight = _mean_of_means(mask, torch.stack([batch.group, own], 1), batch.segment)
        case "sequence-mean-token-mean":
            loss_weight = _mean_of_means(
                mask, torch.arange(samples, device=mask.device)[:, None], batch.segment
            )
        case "sequence-mean-token-sum":
            loss_weight = mask / samples
        case "sequence-mean-token-constant":
            loss_weight = mask / (samples * (config.reduction_length or max_tokens))
    return loss_weight.float()


def _mean_of_means(mask: Tensor, unit: Tensor, segment: Tensor) -> Tensor:
    """[T] float64: 1 / (units * trainable slots of the unit). mask [T] float64; unit [S, any] int64: samples with equal
    rows are one unit."""
    units, index = unit.unique(dim=0, return_inverse=True)
    index = index[segment]
    counts = torch.zeros(len(units), dtype=mask.dtype, device=mask.device).index_add(0, index, mask)
    return mask / (len(units) * counts.clamp(min=1)[index])


def policy_loss(
    logp_new: Tensor,  # [T] float32, carries the graph; anything where not trainable
    batch: TokenBatch,  # a micro-batch of whole samples with share, advantage, weight, keep, and logp_old or rollout
    *,
    config: ObjectiveConfig,
    logp_behaviour: Tensor
    | None = None,  # [T] float32, denominator of the ratio; unset: batch.logp_old
    entropy: Tensor | None = None,  # [T] float32, carries the graph; needed with entropy_coef
    score_baseline: Tensor
    | None = None,  # [T] float32, carries the graph: mean score of the rollout policy (score centering)
    protect: tuple[Term, ...] = TERMS,  # terms that still see rejected slots
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum(loss_weight * (weight * surrogate + kl.coef * KL - entropy_coef * entropy)), and SUMS over slots for logging.

    `score_baseline` makes it -A (weight * log p - score_baseline) with surrogate = pg; it is 0 where nothing is to be subtracted.

    The correction's weight and rejection touch the surrogate; KL and entropy see every trainable slot unless they are
    not protected. `loss_weight` belongs to the whole optimiser step (`loss_weights`), so losses, gradients and metrics of
    micro-batches add up to those of the whole. If nothing is kept the loss is 0 and backward still runs.
    """
    assert batch.loss_weight is not None, "loss_weights() gives loss_weight"
    assert batch.advantage is not None, "compute_advantages() fills advantage"
    assert batch.weight is not None, "reweight() gives weight"
    assert batch.keep is not None, "reweight() gives keep"
    loss_weight, keep = batch.loss_weight, batch.keep
    if logp_behaviour is None:
        assert batch.logp_old is not None, "score() fills logp_old"
        logp_behaviour = batch.logp_old
    # a ratio over the sample is over all its trainable slots, or a gate would change what it gates
    alone = config.ratio_level == "token" and config.surrogate != "gmpo"
    per_slot = surrogate(
        config,
        logp_new,
        logp_behaviour,
        torch.where(keep, batch.advantage, 0.0),
        mask=keep if alone else batch.trainable,
        segment=batch.segment,
        samples=batch.num_samples,
    )
    loss = (loss_weight * torch.where(keep, batch.weight, 0.0) * per_slot.loss).sum()
    sums = {
        "clip_low": (keep & per_slot.clipped_low).sum(),
        "clip_high": (keep & per_slot.clipped_high).sum(),
        "ratio_dev": torch.where(keep, per_slot.ratio - 1, 0.0).abs().sum(),
    }
    if score_baseline is not None:
        loss = loss + (loss_weight * batch.advantage * score_baseline).sum()
    if config.kl.coef and config.kl.where == "loss":
        kl = _kl(logp_new, batch, config, batch.trainable if "kl" in protect else keep)
        loss = loss + config.kl.coef * (loss_weight * kl).sum()
        sums["kl"] = kl.detach().sum()
    if config.entropy_coef:
        assert entropy is not None, "the entropy bonus needs the entropy of this forward"
        seen = batch.trainable if "entropy" in protect else keep
        loss = loss - config.entropy_coef * (loss_weight * torch.where(seen, entropy, 0.0)).sum()
    return loss, sums


def _kl(logp_new: Tensor, batch: TokenBatch, config: ObjectiveConfig, mask: Tensor) -> Tensor:
    assert batch.logp_ref is not None, "score_reference() fills logp_ref"
    sampled = {"none": None, "old": batch.logp_old, "rollout": batch.logp_rollout}[
        config.kl.importance
    ]
    if sampled is not None:
        mask = mask & sampled.isfinite()
        sampled = torch.where(mask, sampled, 0.0)
    kl = kl_loss(
        torch.where(mask, logp_new, 0.0),
        torch.where(mask, batch.logp_ref, 0.0),
        config.kl,
        logp_sampled=sampled,
    )
    return torch.where(mask, kl, 0.0)
