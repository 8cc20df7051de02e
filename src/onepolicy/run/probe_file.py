"""Probe files: tensors of a batch that was also scored without replay, written now and then."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.files import replace_atomically
from onepolicy.types import TokenBatch

MAX_SAVED_ROUTES = 2**20
"""Expert ids of each side in a probe file: 4 MiB."""


def save_counterfactual(
    path: Path,
    batch: TokenBatch,
    without_replay: TokenBatch | None,
    fingerprint: str,
    own: TokenBatch | None = None,
) -> None:
    """Write a probe file: tensors of the n trainable slots.

    The report draws figures from it, and `onepolicy audit RUN` reads it. logp_trainer_native is of
    the scoring without replay. fingerprint: of the trainer; the rollouts' fingerprints are written
    beside it. own: scored under the weights that sampled each token.
    """
    tensors = record_tensors(batch) | _route_tensors(batch)
    tensors |= _support_tensors(batch)
    if own is not None:
        assert own.logp_old is not None
        tensors["logp_own"] = own.logp_old[own.trainable]
    if without_replay is not None:
        assert without_replay.logp_old is not None
        tensors["logp_trainer_native"] = without_replay.logp_old[batch.trainable]
    path.parent.mkdir(exist_ok=True)
    rollout_fingerprints = json.dumps(sorted(batch.fingerprints))
    with replace_atomically(path) as temporary:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            temporary,
            metadata={"fingerprint": fingerprint, "rollout": rollout_fingerprints},
        )


def record_tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """Return the record of the n trainable slots of a scored batch, [n] each.

    A probe holds it (record/probes.py reads it), and `onepolicy measure` writes one a scoring.
    """
    assert batch.logp_old is not None, "score() comes first"
    assert batch.entropy is not None
    columns = {
        "logp_rollout": batch.logp_rollout,
        "logp_trainer": batch.logp_old,
        "entropy": batch.entropy,
        "version": batch.version,
        "tokens": batch.target_ids,
        "segment": batch.segment,
        "turn": batch.turn,
    }
    if batch.logp_vocabulary is not None:
        columns["logp_vocabulary"] = batch.logp_vocabulary
    return {name: values[batch.trainable] for name, values in columns.items()}


def _support_tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """Return the sets of the n trainable slots: their ids, joined, and how many each slot has."""
    if batch.support is None:
        return {}
    kept = batch.support.at(batch.trainable.nonzero()[:, 0])
    return {"support_ids": kept.ids, "support_counts": kept.sizes.int()}


def _route_tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """Return the routes of the first trainable slots; -1 where no route was recorded.

    routes_trainer is the trainer's own choice in the forward that replayed routes_rollout.
    """
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return {}
    slots = batch.trainable.nonzero()[:, 0]
    slots = slots[: MAX_SAVED_ROUTES // (len(batch.routing.layers) * batch.routing.top_k)]
    traces = {"routes_rollout": batch.routing, "routes_trainer": batch.routing_native}
    tensors = {}
    for name, trace in traces.items():
        kept = trace.at(slots)
        tensors[name] = torch.where(kept.valid[:, None, None], kept.ids.int(), -1)
    return tensors
