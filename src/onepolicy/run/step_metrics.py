"""Metrics of a scored batch.

Everything here only reads the batch, so nothing can change training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.divergence.breakdown import metrics_per_turn
from onepolicy.divergence.compare import Mismatch, compare_tokens
from onepolicy.divergence.routing import RoutingDisagreement, routing_disagreement
from onepolicy.types import TokenBatch


def mismatch_metrics(batch: TokenBatch) -> dict[str, float]:
    """Return the mismatch of a scored batch, and routing disagreement if both sides have routes."""
    assert batch.logp_old is not None, "score() comes first"
    assert batch.entropy is not None
    found = compare_sides(batch, batch.logp_old, batch.logp_rollout)
    metrics = found.metrics()
    if (batch.turn[batch.trainable] > 0).any():  # episodes of several turns
        metrics |= metrics_per_turn(batch)
    metrics["train/entropy"] = float(batch.entropy[batch.trainable].mean())
    if batch.support is not None and batch.entropy_vocabulary is not None:
        of_vocabulary = batch.entropy_vocabulary[batch.trainable]
        metrics["train/entropy_vocabulary"] = float(of_vocabulary.mean())
        sizes = batch.support.sizes[batch.trainable]
        metrics["train/support_size"] = float(sizes.double().mean())
    disagreement = _disagreement(batch)
    if disagreement is not None:
        metrics |= disagreement.metrics()
    if batch.gate_mass is not None:
        metrics |= replay_metrics(batch)
    return metrics


def compare_sides(batch: TokenBatch, trainer: Tensor, other: Tensor) -> Mismatch:
    """Compare the trainer's log-probabilities [T] of a batch with others, which are finite."""
    check_finite(batch, trainer)
    mask = batch.trainable
    return compare_tokens(trainer[mask].double(), other[mask].double(), batch.segment[mask])


def check_finite(batch: TokenBatch, trainer: Tensor | None) -> None:
    """Raise TrainingError if the trainer's log-probability [T] of a trainable slot is not finite.

    A run holds both engines, so that is a fault of it and not a missing value.
    """
    if trainer is None:  # bypass: the update scores
        return
    broken = batch.trainable & ~trainer.isfinite()
    if not broken.any():
        return
    slot = int(broken.nonzero()[0, 0])
    raise TrainingError(
        f"the trainer's log-probability of a token of sample {int(batch.segment[slot])} is "
        f"{trainer[slot].item()}; its weights are broken: fork from an earlier checkpoint"
    )


def gradient_metrics(batch: TokenBatch) -> dict[str, float]:
    """Return train/halved_gradient of a batch that was trained on; {} if it had no gradient.

    It is the part of tokens with p_trainer < p_rollout / 2 in the sum of |advantage|
    (1 - p_trainer) weight over kept tokens. That product is the gradient of a token's term with
    respect to its own logit, d log p_i / d logit_i = 1 - p_i, and bounds that of every other one.
    """
    if batch.logp_old is None or batch.advantage is None:
        return {}
    keep = batch.trainable
    if batch.keep is not None:
        keep = batch.keep
    logp_trainer = batch.logp_old[keep]
    bound = batch.advantage[keep].abs() * -torch.expm1(logp_trainer)
    if batch.weight is not None:
        bound = bound * batch.weight[keep]
    total = float(bound.sum())
    if not 0 < total < math.inf:  # also if it is NaN
        return {}
    halved = logp_trainer < batch.logp_rollout[keep] - math.log(2)
    return {"train/halved_gradient": float(bound[halved].sum()) / total}


def _disagreement(batch: TokenBatch) -> RoutingDisagreement | None:
    """Compare the routes of both sides. None if one has none, as with replay.missing = native."""
    native, routing = batch.routing_native, batch.routing
    if native is None or routing is None or not routing.valid.any():
        return None
    differing = batch.routers_differing
    return routing_disagreement(native, routing, segment=batch.segment, differing=differing)


def replay_metrics(batch: TokenBatch) -> dict[str, float]:
    """Return the metrics of a batch scored with replay.

    They are the rows that the trainer routed itself, and the gate mass of the replayed experts.
    """
    assert batch.routing is not None
    assert batch.gate_mass is not None
    valid = batch.routing.valid
    rows_with_route = torch.zeros(batch.num_samples).index_add(0, batch.segment, valid.float())
    metrics = {
        "replay/missing_samples": float((rows_with_route == 0).float().mean()),
        "replay/native_rows": 1 - float(valid.float().mean()),
    }
    if valid.any():
        metrics["replay/gate_mass"] = float(batch.gate_mass[valid].mean())
    return metrics


def metrics_per_layer(batch: TokenBatch) -> dict[str, float]:
    """Return routing/layer@i and replay/gate_mass@i by decoder layer, of two routers the worse."""
    found = _disagreement(batch)
    if found is None or batch.routing is None:
        return {}
    layers = batch.routing.layers
    metrics: dict[str, float] = {}
    for i, share in zip(layers, found.per_layer.tolist(), strict=True):
        metrics[f"routing/layer@{i}"] = max(share, metrics.get(f"routing/layer@{i}", share))
    if batch.gate_mass is not None:
        mass = batch.gate_mass[batch.routing.valid].mean(0).tolist()
        for i, share in zip(layers, mass, strict=True):
            name = f"replay/gate_mass@{i}"
            metrics[name] = min(share, metrics.get(name, share))
    return metrics
