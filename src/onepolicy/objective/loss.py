"""The loss of a micro-batch: weighted sums over its slots, one scalar to differentiate."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.config.correction import LOSS_TERMS, LossTerm
from onepolicy.config.surrogates import SURROGATES
from onepolicy.objective.kl import batch_kl
from onepolicy.objective.surrogate import Surrogate, ratio_level, surrogate
from onepolicy.types import TokenBatch


def loss_weights(batch: TokenBatch, config: ObjectiveConfig, *, max_tokens: int) -> Tensor:
    """Return `loss_weight` [T] float32 of each slot; 0 outside the trainable slots.

    The loss is sum(loss_weight * keep * weight * surrogate). `batch` is the minibatch of a whole
    optimiser step. So any split into micro-batches adds up to the same loss and gradient.

    Raises UsageError if there is no trainable slot.
    """
    if not batch.trainable.any():
        raise UsageError("the step has no trainable slot to divide by")
    return _reduction_weights(batch, config, max_tokens).float()


def _reduction_weights(batch: TokenBatch, config: ObjectiveConfig, max_tokens: int) -> Tensor:
    """Return [T] float64 for N slots, S samples of T_i, P prompts of T_p, R episodes of T_r slots.

    - token-mean: 1 / N
    - prompt-mean: 1 / (P T_p)
    - episode-mean: 1 / (R T_r); an episode whose history was rewritten has several samples
    - sequence-mean-token-mean: 1 / (S T_i)
    - sequence-mean-token-sum: 1 / S
    - sequence-mean-token-constant: 1 / (S L), L = reduction_length or `max_tokens` (Dr. GRPO)

    All counts are of trainable slots, before any rejection.
    """
    mask = batch.trainable.double()
    samples = batch.num_samples
    sample_index = torch.arange(samples, device=mask.device)
    match config.reduction:
        case "token-mean":
            return mask / mask.sum()
        case "prompt-mean":
            return _mean_of_means(mask, batch.group[:, None], batch.segment)
        case "episode-mean":
            episode = batch.episode
            if episode is None:
                episode = sample_index
            return _mean_of_means(mask, torch.stack([batch.group, episode], 1), batch.segment)
        case "sequence-mean-token-mean":
            return _mean_of_means(mask, sample_index[:, None], batch.segment)
        case "sequence-mean-token-sum":
            return mask / samples
        case "sequence-mean-token-constant":
            return mask / (samples * (config.reduction_length or max_tokens))


def _mean_of_means(mask: Tensor, unit: Tensor, segment: Tensor) -> Tensor:
    """Return [T] float64: 1 / (number of units * trainable slots of the slot's unit).

    mask: [T] float64. unit: [S, any] int64; samples with equal rows form one unit.
    """
    units, index = unit.unique(dim=0, return_inverse=True)
    index = index[segment]
    counts = torch.zeros(len(units), dtype=mask.dtype, device=mask.device).index_add(0, index, mask)
    return mask / (len(units) * counts.clamp(min=1)[index])


def policy_loss(
    logp_new: Tensor,  # [T] float32, carries the graph; any value where not trainable
    batch: TokenBatch,  # micro-batch of whole samples: loss_weight, advantage, weight, keep are set
    *,
    config: ObjectiveConfig,
    # [T] float32, the policy in the denominator of the ratio: batch.logp_old or batch.logp_rollout
    logp_behaviour: Tensor,
    entropy: Tensor | None = None,  # [T] float32, carries the graph; needed with entropy_coef
    # [T] float32, carries the graph: the rollout policy's mean score (score centering)
    score_baseline: Tensor | None = None,
    protect: tuple[LossTerm, ...] = LOSS_TERMS,  # terms that still see rejected slots
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and sums over slots for logging.

    loss = sum(loss_weight * (weight * surrogate + kl.coef * KL - entropy_coef * entropy)).
    With surrogate = pg, `score_baseline` makes the first term -A (weight * log p - score_baseline).
    It is 0 where nothing is to be subtracted.

    The correction's weight and rejection apply to the surrogate. KL and entropy see every trainable
    slot, unless `protect` leaves them out. `loss_weight` belongs to the whole optimiser step
    (`loss_weights`), so losses, gradients and metrics of micro-batches add up to those of the
    whole. If every slot is rejected, the loss is 0 and backward still runs.
    """
    assert batch.loss_weight is not None, "loss_weights() gives loss_weight"
    assert batch.weight is not None, "reweight() gives weight"
    assert batch.keep is not None, "reweight() gives keep"
    loss_weight, keep = batch.loss_weight, batch.keep
    per_slot = _surrogate(logp_new, logp_behaviour, batch, config)
    loss = (loss_weight * torch.where(keep, batch.weight, 0.0) * per_slot.loss).sum()
    sums = _ratio_sums(per_slot, keep)
    if score_baseline is not None:
        assert batch.advantage is not None
        loss = loss + (loss_weight * batch.advantage * score_baseline).sum()
    if config.kl.coef and config.kl.where == "loss":
        kl = batch_kl(logp_new, batch, config, _seen_by("kl", protect, batch.trainable, keep))
        loss = loss + config.kl.coef * (loss_weight * kl).sum()
        sums["kl"] = kl.detach().sum()
    if config.entropy_coef:
        assert entropy is not None, "the entropy bonus needs the entropy of this forward"
        seen = _seen_by("entropy", protect, batch.trainable, keep)
        loss = loss - config.entropy_coef * (loss_weight * torch.where(seen, entropy, 0.0)).sum()
    return loss, sums


def _surrogate(
    logp_new: Tensor, logp_behaviour: Tensor, batch: TokenBatch, config: ObjectiveConfig
) -> Surrogate:
    assert batch.advantage is not None, "compute_advantages() fills advantage"
    assert batch.keep is not None
    # A ratio of a whole sample is over all its trainable slots. Otherwise a gate would change the
    # very ratio that it gates.
    mask = batch.trainable
    if ratio_level(config) == "token" and not SURROGATES[config.surrogate].whole_samples:
        mask = batch.keep
    return surrogate(
        config,
        logp_new,
        logp_behaviour,
        torch.where(batch.keep, batch.advantage, 0.0),
        mask=mask,
        segment=batch.segment,
        samples=batch.num_samples,
    )


def _ratio_sums(per_slot: Surrogate, keep: Tensor) -> dict[str, Tensor]:
    return {
        "clip_low": (keep & per_slot.clipped_low).sum(),
        "clip_high": (keep & per_slot.clipped_high).sum(),
        "ratio_dev": torch.where(keep, per_slot.ratio - 1, 0.0).abs().sum(),
    }


def _seen_by(
    term: LossTerm, protect: tuple[LossTerm, ...], trainable: Tensor, keep: Tensor
) -> Tensor:
    """Return [T] bool: the slots that this term of the loss sees."""
    if term in protect:
        return trainable
    return keep
