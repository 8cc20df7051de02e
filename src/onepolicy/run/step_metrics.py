"""Measure a scored batch, and the same batch scored without replay. Reads only; nothing here can change training."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.divergence.attribution import k3_terms
from onepolicy.divergence.breakdown import TURNS, turn_bins
from onepolicy.divergence.logprob import mismatch
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.files import replace_atomically
from onepolicy.interfaces import Scorer
from onepolicy.types import TokenBatch

MAX_SAVED_ROUTES = 2**20
"""Expert ids of each side written with a probe: 4 MiB."""


def mismatch_metrics(batch: TokenBatch) -> dict[str, float]:
    """Mismatch of a scored batch; routing disagreement too if both sides have routes."""
    assert batch.logp_old is not None, "score() comes first"
    assert batch.entropy is not None
    metrics = mismatch(
        batch.logp_old, batch.logp_rollout, batch.trainable, segment=batch.segment
    ).metrics()
    metrics |= metrics_per_turn(batch)
    metrics["train/entropy"] = float(batch.entropy[batch.trainable].mean())
    if batch.routing is not None and batch.routing_native is not None:
        metrics |= _disagreement(batch)
    if batch.gate_mass is not None:
        metrics |= replay_metrics(batch)
    return metrics


def metrics_per_turn(batch: TokenBatch) -> dict[str, float]:
    """Where an episode has several turns: mismatch/k3_turn@k and train/tokens_turn@k, k3 and number of the tokens of
    turn k up to the next bin."""
    turn = batch.turn[batch.trainable].long()
    if not len(turn) or int(turn.max()) == 0:
        return {}
    return _by_bins(batch, turn, "mismatch/k3_turn", "train/tokens_turn")


def metrics_per_staleness(batch: TokenBatch, version: int) -> dict[str, float]:
    """mismatch/k3_staleness@k and staleness/tokens@k: k3 and number of the tokens that were sampled k updates before
    `version`, which scored them, up to the next bin."""
    age = version - batch.version[batch.trainable].long()
    return _by_bins(batch, age, "mismatch/k3_staleness", "staleness/tokens")


def _by_bins(batch: TokenBatch, number: Tensor, k3: str, tokens: str) -> dict[str, float]:
    """k3@k and tokens@k of a scored batch; number [n] int64, from 0, of each trainable slot."""
    mine = batch.trainable
    assert batch.logp_old is not None
    terms = k3_terms(batch.logp_old[mine], batch.logp_rollout[mine])
    bins = turn_bins(number)
    found = {k: part for i, k in enumerate(TURNS) if len(part := terms[bins == i])}
    means = {f"{k3}@{k}": float(part.mean()) for k, part in found.items()}
    return means | {f"{tokens}@{k}": float(len(part)) for k, part in found.items()}


def _disagreement(batch: TokenBatch) -> dict[str, float]:
    assert batch.routing is not None
    assert batch.routing_native is not None
    if not batch.routing.valid.any():  # no engine returned routes, and replay.missing = native
        return {}
    return routing_disagreement(
        batch.routing_native, batch.routing, segment=batch.segment
    ).metrics()


def replay_metrics(batch: TokenBatch) -> dict[str, float]:
    """Of a batch scored with replay: who routed its rows, and how good the replayed experts are to the trainer."""
    assert batch.routing is not None
    assert batch.gate_mass is not None
    valid = batch.routing.valid
    routed = torch.zeros(batch.num_samples).index_add(0, batch.segment, valid.float())
    metrics = {
        "replay/missing_samples": float((routed == 0).sum()),
        "replay/native_rows": 1 - float(valid.float().mean()),
    }
    if valid.any():
        metrics["replay/gate_mass"] = float(batch.gate_mass[valid].mean())
    return metrics


def metrics_per_layer(batch: TokenBatch) -> dict[str, float]:
    """routing/layer@i and replay/gate_mass@i of every MoE layer, i its decoder index."""
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return {}
    layers = batch.routing.layers
    differing = routing_disagreement(batch.routing_native, batch.routing).per_layer.tolist()
    metrics = {
        f"routing/layer@{layer}": share for layer, share in zip(layers, differing, strict=True)
    }
    if batch.gate_mass is not None:
        held = batch.gate_mass[batch.routing.valid].mean(0).tolist()
        metrics |= {
            f"replay/gate_mass@{layer}": share for layer, share in zip(layers, held, strict=True)
        }
    return metrics


def repeat_metrics(
    scorer: Scorer, batch: TokenBatch, without_replay: TokenBatch
) -> dict[str, float]:
    """Variation of the trainer with itself (R3 paper, section 3.3): the same samples and weights a second time, packed
    in the opposite order; with replay repeat/..., without it counterfactual/repeat/... `batch` and `without_replay` are
    scored. Two more scoring forwards."""
    order = list(range(batch.num_samples))[::-1]
    reversed_batch = batch.select(order)
    again = scorer.score(reversed_batch).select(order)
    native = scorer.score(reversed_batch, replay=False).select(order)
    plain = compare_scorings(without_replay, native)
    return compare_scorings(batch, again) | {
        f"counterfactual/{name}": value for name, value in plain.items()
    }


def compare_scorings(first: TokenBatch, second: TokenBatch) -> dict[str, float]:
    """k3, max |log ratio| and routers that differ between two scorings of the same slots."""
    assert first.logp_old is not None
    assert second.logp_old is not None
    found = mismatch(second.logp_old, first.logp_old, first.trainable)
    metrics = {"repeat/k3": found.k3, "repeat/max_dlogp": found.max_dlogp}
    if first.routing_native is not None and second.routing_native is not None:
        metrics["repeat/routers"] = routing_disagreement(
            first.routing_native, second.routing_native
        ).routers
    return metrics


def counterfactual_metrics(without_replay: TokenBatch) -> dict[str, float]:
    """The same measures of the batch scored without replay, named counterfactual/..."""
    metrics = mismatch_metrics(without_replay)
    return {
        f"counterfactual/{name}": value
        for name, value in metrics.items()
        if not name.startswith("train/")
    } | {
        f"counterfactual/{name}": value for name, value in metrics_per_layer(without_replay).items()
    }


def save_counterfactual(
    path: Path, batch: TokenBatch, without_replay: TokenBatch | None, fingerprint: str
) -> None:
    """Tensors the report draws its figures from and `onepolicy audit RUN` reads, of the n trainable slots; names ending
    in _native are the scoring without replay. fingerprint: of the trainer; the rollouts' stand beside it."""
    assert batch.logp_old is not None
    assert batch.entropy is not None
    mask = batch.trainable
    tensors = {"logp_rollout": batch.logp_rollout[mask], "logp_trainer": batch.logp_old[mask]}
    tensors |= {"entropy": batch.entropy[mask], "version": batch.version[mask]}
    tensors |= {
        "tokens": batch.target_ids[mask],
        "segment": batch.segment[mask],
        "turn": batch.turn[mask],
    }
    tensors |= routing_tensors(batch, "") | _routes(batch)
    if without_replay is not None:
        assert without_replay.logp_old is not None
        tensors["logp_trainer_native"] = without_replay.logp_old[mask]
        tensors |= routing_tensors(without_replay, "_native")
    path.parent.mkdir(exist_ok=True)
    prints = {"fingerprint": fingerprint, "rollout": json.dumps(sorted(batch.fingerprints))}
    with replace_atomically(path) as temporary:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            temporary,
            metadata=prints,
        )


def _routes(batch: TokenBatch) -> dict[str, Tensor]:
    """routes_rollout and routes_trainer (its own choice in the same forward) of the first slots, -1: not recorded."""
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return {}
    slots = batch.trainable.nonzero()[:, 0]
    slots = slots[: MAX_SAVED_ROUTES // (len(batch.routing.layers) * batch.routing.top_k)]
    tensors = {}
    for name, trace in (
        ("routes_rollout", batch.routing),
        ("routes_trainer", batch.routing_native),
    ):
        kept = trace.at(slots)
        tensors[name] = torch.where(kept.valid[:, None, None], kept.ids.int(), -1)
    return tensors


def routing_tensors(batch: TokenBatch, suffix: str = "") -> dict[str, Tensor]:
    """How far the trainer's own experts are from the rollout's, per token, layer, sequence; empty without routes."""
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return {}
    mass = (
        {}
        if batch.gate_mass is None
        else {"gate_mass_per_layer": batch.gate_mass[batch.routing.valid].mean(0)}
    )
    found = routing_disagreement(batch.routing_native, batch.routing, segment=batch.segment)
    return {
        f"disagree_per_token{suffix}": found.per_token_count.to(torch.int32),
        f"disagree_per_layer{suffix}": found.per_layer.float(),
        f"disagree_per_sequence{suffix}": found.sequence_mean.float(),
        f"experts_differing{suffix}": found.expert_counts,
        "moe_layers": torch.tensor(batch.routing.layers, dtype=torch.int32),
    } | mass
