"""A synthetic run folder as the loop writes it: learning curve, mismatch with and without replay,
routes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from onepolicy.config import resolve
from onepolicy.run.log import RunLog, read_metrics
from onepolicy.run.summary import summarise

LAYERS, TOP_K = 8, 4


def make_fixture_run(
    path: Path,
    *,
    steps: int = 60,
    tokens: int = 3000,
    replay: bool = True,
    moe: bool = True,
    evaluation: bool = True,
    turns: bool = False,
) -> Path:
    """Write the run. Replay off: no counterfactual. Dense (moe=False): no routing metrics or
    tensors. evaluation=False: no eval/*. turns: of an episode of several."""
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    with RunLog(path) as log:
        if evaluation:
            log.write(
                0,
                {
                    "eval/greedy": 0.46,
                    "eval/avg@4": 0.42,
                    "eval/pass@4": 0.7,
                    "eval/response_length": 75.0,
                },
            )
        for step in range(1, steps + 1):
            row = _row(rng, step, steps, moe=moe) | (_turns(step) if turns else {})
            if replay and step % 10 == 0:
                row |= {
                    f"counterfactual/{name}": 3 * value
                    for name, value in row.items()
                    if _compared(name)
                }
            if evaluation and step % 15 == 0:
                row |= {
                    "eval/greedy": min(0.97, row["train/reward"] + 0.04),
                    "eval/avg@4": row["train/reward"],
                }
                row |= {
                    "eval/pass@4": min(1.0, row["train/reward"] + 0.15),
                    "eval/response_length": 80.0,
                }
            log.write(step, row)
            log.write_sample(_sample(step))
    for step in range(10, steps + 1, 10):
        write_probe(
            path / "probes" / f"step_{step:05d}.safetensors",
            tokens=tokens,
            replay=replay,
            moe=moe,
            seed=step,
        )
    config = resolve(
        {
            "out": str(path),
            "steps": steps,
            "model": {"path": "tiny"},
            "task": {"kind": "chain"},
            "replay": {"mode": "r3" if replay else "off"},
            "optim": {"lr": 1e-4},
            "eval": {"every": 15 if evaluation else 0, "k": 4},
        }
    )
    (path / "config.json").write_text(config.model_dump_json(indent=1))
    (path / "run.json").write_text(
        json.dumps({"started": "2026-01-02T03:04:05", "versions": {}, "parent": None})
    )
    summary = summarise(config, read_metrics(path), path, None)
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def _compared(name: str) -> bool:
    return name in ("mismatch/k3", "mismatch/f2") or name.startswith(
        ("routing/", "mismatch/k3_turn@")
    )


def _turns(step: int) -> dict[str, float]:
    """Return metrics of turns 1, 2 and 9 to 16. k3 is 1, 2 and 3 times 1e-6 at step 10 and twice
    that at every other step."""
    bins = {0: 300.0, 1: 200.0, 8: 100.0}
    scale = 1e-6 if step == 10 else 2e-6
    means = {f"mismatch/k3_turn@{turn}": scale * (i + 1) for i, turn in enumerate(bins)}
    return means | {
        f"train/tokens_turn@{turn}": 3 * count if step == 10 else count
        for turn, count in bins.items()
    }


def _row(rng: np.random.Generator, step: int, steps: int, *, moe: bool) -> dict[str, float]:
    reward = 0.45 + 0.48 * (1 - math.exp(-3 * step / steps)) + rng.normal(0, 0.035)
    k3 = 3e-6 * math.exp(rng.normal(0, 0.8))
    seconds = {"rollout": 0.62, "score": 0.15, "update": 0.41, "sync": 0.016}
    times = {
        f"time/{name}": value * math.exp(rng.normal(0, 0.06)) for name, value in seconds.items()
    }
    row = {
        "train/reward": float(np.clip(reward, 0, 1)),
        "train/response_length": 74 + rng.normal(0, 1.0) + 4 * step / steps,
        "train/entropy": 0.07 * math.exp(-step / steps) + abs(rng.normal(0, 0.003)),
        "train/grad_norm": 0.25 * math.exp(rng.normal(0, 0.3)),
        "train/tokens_per_second": 3210.0,
        "mismatch/k3": k3 if step != 7 else 0.0,
        "mismatch/f2": float(rng.poisson(0.3)) / 4800,
        **times,
        "time/step": sum(times.values()) + 0.05,
    }
    if moe:
        row |= {"routing/routers": 0.009, "routing/tokens": 0.06, "routing/sequence": 0.07}
    return row


def _sample(step: int) -> dict[str, object]:
    return {
        "step": step,
        "problem": step,
        "prompt": "7*3+5-9=" if step % 2 else "<script>window.hacked = true</script>",
        "response": "7*3=1;1+5=6;6-9=7;#7"
        if step % 2
        else "</pre><b>& 'quoted'</b> \u00e9\u2028 #6",
        "answer": "7",
        "reward": float(step % 2),
        "finish": "stop",
        "mean_logp_rollout": -0.0512,
        "mean_logp_trainer": -0.0515,
    }


def write_probe(path: Path, *, tokens: int, replay: bool, moe: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    rollout = np.log(
        np.where(rng.random(tokens) < 0.7, rng.beta(40, 0.6, tokens), rng.beta(1.4, 1.1, tokens))
    )
    noise = rng.standard_t(3, tokens) * np.sqrt(1 - np.exp(rollout))
    tensors = {"logp_rollout": rollout, "logp_trainer": np.minimum(rollout + 0.004 * noise, 0)}
    if replay:
        tensors["logp_trainer_native"] = np.minimum(
            rollout + 0.03 * noise * np.exp(rng.normal(0, 0.5, tokens)), 0
        )
    out = {name: value.astype(np.float32) for name, value in tensors.items()}
    if moe:
        rates = {"": 0.009, "_native": 0.03} if replay else {"": 0.03}
        for suffix, rate in rates.items():
            out |= {f"{name}{suffix}": value for name, value in _routes(rng, tokens, rate).items()}
        if replay:
            out["gate_mass_per_layer"] = (1 - 0.001 * np.arange(1, LAYERS + 1)).astype(np.float32)
    save_file(out, path)


def _routes(rng: np.random.Generator, tokens: int, rate: float) -> dict[str, np.ndarray]:
    per_layer = rate * np.linspace(0.3, 1.7, LAYERS)
    differs = rng.random((tokens, LAYERS)) < per_layer
    experts = np.where(differs, 1 + (rng.random((tokens, LAYERS)) < 0.1), 0)
    return {
        "disagree_per_token": differs.sum(1).astype(np.uint8),
        "disagree_per_layer": differs.mean(0).astype(np.float32),
        "disagree_per_sequence": differs.sum(1)[: tokens // 60 * 60]
        .reshape(-1, 60)
        .mean(1)
        .astype(np.float32),
        "experts_differing": np.bincount(experts.ravel(), minlength=TOP_K + 1).astype(np.int64),
    }
