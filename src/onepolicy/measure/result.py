"""Results of `onepolicy measure`: in memory, and as the files that a report is made of."""

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
from onepolicy.divergence.compare import Mismatch
from onepolicy.files import replace_atomically, write_text_atomically
from onepolicy.measure.attribution import Ablation, Explained
from onepolicy.run.probe_file import record_tensors
from onepolicy.run.step_metrics import metrics_per_layer, mismatch_metrics
from onepolicy.train.rescore import mismatch_of
from onepolicy.types import Group, TokenBatch
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.rules import Verdict


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """One batch of rollouts, scored by the trainer."""

    groups: Sequence[Group]
    native: TokenBatch  # without replay
    replayed: TokenBatch | None  # None: a dense model, or rejected routes
    routes: str  # reason why the routes were rejected
    explained: Explained  # the gap with settings of both sides made equal
    diagnosis: Diagnosis
    top: tuple[TokenBatch, TokenBatch | None] | None = None  # both, with the likeliest tokens

    @property
    def found(self) -> Mismatch:
        """Mismatch without replay."""
        return mismatch_of(self.native)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything that `onepolicy measure` reports."""

    model: str
    config: RunConfig
    scored: ScoredRollouts
    waterfall: Waterfall
    ablations: list[Ablation]
    repeats: dict[str, float]
    breakdowns: dict[str, list[Row]]
    worst: list[WorstToken]
    verdict: Verdict
    distribution: dict[str, Any] | None = None  # from measure/distributions.py, with --top
    dense: tuple[str, ScoredRollouts] | None = None  # name and rollouts of the dense model


def to_tree(found: Measurement) -> dict[str, Any]:
    """Return the JSON-ready content of measure.json, which report/measure.py draws and prints."""
    scored, dense = found.scored, None
    if found.dense is not None:
        dense = found.dense[0]
    pressure = None
    if found.config.rollout.pressure is not None:
        pressure = found.config.rollout.pressure.describe()
    return {
        "model": found.model,
        "dense": dense,
        "tokens": scored.found.tokens,
        "sequences": scored.native.num_samples,
        "pressure": pressure,
        "temperature_factor": scored.explained.rescorer.factor,
        "verdict": dataclasses.asdict(found.verdict),
        "waterfall": dataclasses.asdict(found.waterfall, dict_factory=_without_nan),
        "alone": [dataclasses.asdict(a, dict_factory=_without_nan) for a in found.ablations],
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


def _without_nan(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a record as a dict; the ends of an interval that is not known are None."""
    return {name: None if value != value else value for name, value in fields}


def write(found: Measurement, out: Path) -> None:
    """Write OUT/measure.json and OUT/tensors.safetensors, which the figures are drawn from.

    Tensors are called SCORING.NAME: of each scoring of `batches` its record, with the names of a
    run's probe.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for scoring, batch in batches(found).items():
        for name, value in record_tensors(batch).items():
            tensors[f"{scoring}.{name}"] = value.contiguous()
    with replace_atomically(out / "tensors.safetensors") as path:
        save_file(tensors, path)
    write_text_atomically(out / "measure.json", json.dumps(to_tree(found), indent=1))


def batches(found: Measurement) -> dict[str, TokenBatch]:
    """Return the scored batches by the name of their scoring."""
    out = {"without_replay": found.scored.native}
    if found.scored.replayed is not None:
        out["with_replay"] = found.scored.replayed
    if found.dense is not None:
        out["dense"] = found.dense[1].native
    return out


def prediction(found: Measurement) -> dict[str, Any] | None:
    """Return the predicted effect of the run's correction at the measured k3 and mean length."""
    correction, batch = found.config.correction, found.scored.replayed or found.scored.native
    kl, length = mismatch_of(batch).k3, round(int(batch.trainable.sum()) / batch.num_samples)
    if not kl > 0 or length < 1:
        return None
    would = predict(correction, kl, length)
    return {"correction": correction.name, "kl": kl, "length": length} | dataclasses.asdict(would)


def numbers(found: Measurement) -> dict[str, dict[str, float]]:
    """Return every metric of each scoring, by the names of run/metrics.toml."""
    out = {
        scoring: mismatch_metrics(batch) | metrics_per_layer(batch)
        for scoring, batch in batches(found).items()
    }
    return out | {"repeated_forward": found.repeats}
