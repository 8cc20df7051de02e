"""What `onepolicy measure` found: in memory, and as the files a report is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

import onepolicy
from onepolicy.config import RunConfig
from onepolicy.correct.predict import predict
from onepolicy.divergence.attribution import Waterfall
from onepolicy.divergence.breakdown import Row, WorstToken
from onepolicy.divergence.logprob import Mismatch
from onepolicy.measure.attribution import Alone, Explained
from onepolicy.run.step_metrics import metrics_per_layer, mismatch_metrics, routing_tensors
from onepolicy.train.rescore import logp_of, mismatch_of
from onepolicy.types import Group, TokenBatch
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.rules import Verdict


@dataclass(frozen=True, slots=True)
class Look:
    """One batch of rollouts, scored."""

    groups: Sequence[Group]
    native: TokenBatch  # without replay
    replayed: TokenBatch | None  # None: a dense model, or routes that were refused
    routes: str  # why they were refused
    explained: Explained  # what settings of both sides explain of it
    diagnosis: Diagnosis
    top: tuple[TokenBatch, TokenBatch | None] | None = (
        None  # native, replayed with both engines' likeliest tokens
    )

    @property
    def found(self) -> Mismatch:
        return mismatch_of(self.native)


@dataclass(frozen=True, slots=True)
class Measurement:
    model: str
    config: RunConfig
    look: Look
    waterfall: Waterfall
    alone: list[Alone]
    repeats: dict[str, float]
    breakdowns: dict[str, list[Row]]
    worst: list[WorstToken]
    verdict: Verdict
    distribution: dict[str, Any] | None = None  # of measure/distributions.py, if it was asked for
    dense: tuple[str, Look] | None = None  # name, and its own rollouts


def to_tree(found: Measurement) -> dict[str, Any]:
    """JSON-ready: what report/measure.py draws and prints."""
    seen = found.look
    return {
        "model": found.model,
        "dense": None if found.dense is None else found.dense[0],
        "tokens": seen.found.tokens,
        "sequences": seen.native.num_samples,
        "temperature_factor": seen.explained.rescorer.factor,
        "verdict": dataclasses.asdict(found.verdict),
        "waterfall": dataclasses.asdict(found.waterfall),
        "alone": [dataclasses.asdict(each) for each in found.alone],
        "metrics": numbers(found),
        "breakdowns": {
            name: [dataclasses.asdict(r) for r in rows] for name, rows in found.breakdowns.items()
        },
        "worst": [dataclasses.asdict(each) for each in found.worst],
        "distribution": found.distribution,
        "prediction": prediction(found),
        "config": found.config.model_dump(mode="json"),
        "started": datetime.now().isoformat(timespec="seconds"),
        "versions": {
            "onepolicy": onepolicy.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def write(found: Measurement, out: Path) -> None:
    """OUT/measure.json, and OUT/tensors.safetensors, of which the figures are drawn: SCORING.NAME for each scoring of
    `batches`, with the names of run/step_metrics.py."""
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for scoring, batch in batches(found).items():
        mask = batch.trainable
        own = {
            "logp_rollout": batch.logp_rollout[mask],
            "logp_trainer": logp_of(batch)[mask],
        } | routing_tensors(batch)
        tensors |= {f"{scoring}.{name}": value.contiguous() for name, value in own.items()}
    save_file(tensors, out / "tensors.safetensors")
    (out / "measure.json").write_text(json.dumps(to_tree(found), indent=1), encoding="utf-8")


def batches(found: Measurement) -> dict[str, TokenBatch]:
    """The scored batches by the name of their scoring."""
    seen = found.look
    out = {"without_replay": seen.native}
    if seen.replayed is not None:
        out["with_replay"] = seen.replayed
    return out if found.dense is None else out | {"dense": found.dense[1].native}


def prediction(found: Measurement) -> dict[str, Any] | None:
    """What the run's correction would keep of a step, and multiply it by, at the measured k3 and mean length."""
    correction, batch = found.config.correction, found.look.replayed or found.look.native
    kl, length = mismatch_of(batch).k3, round(int(batch.trainable.sum()) / batch.num_samples)
    if not kl > 0 or length < 1:
        return None
    would = predict(correction, kl, length)
    return {"correction": correction.name, "kl": kl, "length": length} | dataclasses.asdict(would)


def numbers(found: Measurement) -> dict[str, dict[str, float]]:
    """Every metric of each scoring, by the names of run/log.py."""
    out = {
        scoring: mismatch_metrics(batch) | metrics_per_layer(batch)
        for scoring, batch in batches(found).items()
    }
    return out | {"repeated_forward": found.repeats}
