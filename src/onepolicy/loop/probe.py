"""Measure a scored batch, and the same batch scored without replay. Reads only; nothing here can change training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.measure.logprob import mismatch
from onepolicy.measure.routing import routing_disagreement
from onepolicy.types import TokenBatch


def measure(batch: TokenBatch) -> dict[str, float]:
    """Mismatch of a scored batch; routing disagreement too if both sides have routes."""
    assert batch.logp_old is not None, "score() comes first"
    assert batch.entropy is not None
    metrics = mismatch(batch.logp_old, batch.logp_rollout, batch.trainable, segment=batch.segment).metrics()
    metrics["train/entropy"] = float(batch.entropy[batch.trainable].mean())
    if batch.routing is not None and batch.routing_native is not None:
        metrics |= routing_disagreement(batch.routing_native, batch.routing, segment=batch.segment).metrics()
    return metrics


def counterfactual(without_replay: TokenBatch) -> dict[str, float]:
    """The same measures of the batch scored without replay, named counterfactual/..."""
    metrics = measure(without_replay)
    return {f"counterfactual/{name}": value for name, value in metrics.items() if not name.startswith("train/")}


def save_probe(path: Path, batch: TokenBatch, without_replay: TokenBatch | None) -> None:
    """Tensors the report draws its figures from; names ending in _native are the scoring without replay."""
    assert batch.logp_old is not None
    mask = batch.trainable
    tensors = {"logp_rollout": batch.logp_rollout[mask], "logp_trainer": batch.logp_old[mask]}
    tensors |= _routing_tensors(batch, "")
    if without_replay is not None:
        assert without_replay.logp_old is not None
        tensors["logp_trainer_native"] = without_replay.logp_old[mask]
        tensors |= _routing_tensors(without_replay, "_native")
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".writing")
    save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
    temporary.rename(path)


def _routing_tensors(batch: TokenBatch, suffix: str) -> dict[str, Tensor]:
    if batch.routing is None or batch.routing_native is None:
        return {}
    found = routing_disagreement(batch.routing_native, batch.routing, segment=batch.segment)
    return {
        f"disagree_per_token{suffix}": found.per_token_count.to(torch.int32),
        f"disagree_per_layer{suffix}": found.per_layer.float(),
        f"disagree_per_sequence{suffix}": found.sequence_mean.float(),
        f"experts_differing{suffix}": found.expert_counts,
    }
