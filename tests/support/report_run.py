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

LAYERS = 8  # with experts


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
    """Write the run. Replay off: no counterfactual. Dense (moe=False): no routing metrics.
    evaluation=False: no eval/*. turns: of an episode of several."""
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    with RunLog(path) as log:
        if evaluation:
            log.write(0, _evaluation(greedy=0.46, average=0.42, passed=0.7, length=75.0))
        for step in range(1, steps + 1):
            row = _row(rng, step, steps, moe=moe) | (_turns(step) if turns else {})
            if moe and step % 10 == 0:
                row |= layers(replay=replay)
            if replay and step % 10 == 0:
                compared = {name: 3 * value for name, value in row.items() if _compared(name)}
                row |= {f"counterfactual/{name}": value for name, value in compared.items()}
            if evaluation and step % 15 == 0:
                average = row["train/reward"]
                best = {"greedy": min(0.97, average + 0.04), "passed": min(1.0, average + 0.15)}
                row |= _evaluation(average=average, length=80.0, **best)
            log.write(step, row)
            log.write_sample(_sample(step))
    for step in range(10, steps + 1, 10):
        probe = path / "probes" / f"step_{step:05d}.safetensors"
        write_probe(probe, tokens=tokens, replay=replay, seed=step)
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
    started = {"started": "2026-01-02T03:04:05", "versions": {}, "parent": None}
    (path / "run.json").write_text(json.dumps(started))
    summary = summarise(config, read_metrics(path), path, None)
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def _evaluation(*, greedy: float, average: float, passed: float, length: float):
    found = {"eval/greedy": greedy, "eval/avg@4": average, "eval/pass@4": passed}
    return found | {"eval/response_length": length}


def _compared(name: str) -> bool:
    several = ("routing/", "mismatch/k3_turn@")
    return name in ("mismatch/k3", "mismatch/f2") or name.startswith(several)


def _turns(step: int) -> dict[str, float]:
    """Return metrics of turns 1, 2 and 9 to 16. k3 is 1, 2 and 3 times 1e-6 at step 10 and twice
    that at every other step."""
    bins = {0: 300.0, 1: 200.0, 8: 100.0}
    scale = 1e-6 if step == 10 else 2e-6
    counts = 3 if step == 10 else 1
    means = {f"mismatch/k3_turn@{turn}": scale * (i + 1) for i, turn in enumerate(bins)}
    return means | {f"train/tokens_turn@{turn}": counts * count for turn, count in bins.items()}


def _row(rng: np.random.Generator, step: int, steps: int, *, moe: bool) -> dict[str, float]:
    reward = 0.45 + 0.48 * (1 - math.exp(-3 * step / steps)) + rng.normal(0, 0.035)
    k3 = 3e-6 * math.exp(rng.normal(0, 0.8))
    seconds = {"rollout": 0.62, "score": 0.15, "update": 0.41, "sync": 0.016}
    times = {f"time/{name}": s * math.exp(rng.normal(0, 0.06)) for name, s in seconds.items()}
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
    said = {"prompt": "7*3+5-9=", "response": "7*3=1;1+5=6;6-9=7;#7"}
    if step % 2 == 0:
        said = {"prompt": "<script>window.hacked = true</script>"}
        said |= {"response": "</pre><b>& 'quoted'</b> \u00e9\u2028 #6"}
    graded = {"answer": "7", "reward": float(step % 2), "finish": "stop"}
    logp = {"mean_logp_rollout": -0.0512, "mean_logp_trainer": -0.0515}
    return {"step": step, "problem": step} | said | graded | logp


def layers(*, replay: bool) -> dict[str, float]:
    """Return the metrics by layer; only every other decoder layer has experts."""
    found = {f"routing/layer@{2 * i}": 0.003 * (1 + i) for i in range(LAYERS)}
    if replay:
        found |= {f"replay/gate_mass@{2 * i}": 1 - 0.001 * (1 + i) for i in range(LAYERS)}
    return found


def write_probe(path: Path, *, tokens: int, replay: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(exist_ok=True)
    sure = rng.random(tokens) < 0.7
    rollout = np.log(np.where(sure, rng.beta(40, 0.6, tokens), rng.beta(1.4, 1.1, tokens)))
    noise = rng.standard_t(3, tokens) * np.sqrt(1 - np.exp(rollout))
    tensors = {"logp_rollout": rollout, "logp_trainer": np.minimum(rollout + 0.004 * noise, 0)}
    if replay:
        native = rollout + 0.03 * noise * np.exp(rng.normal(0, 0.5, tokens))
        tensors["logp_trainer_native"] = np.minimum(native, 0)
    save_file({name: value.astype(np.float32) for name, value in tensors.items()}, path)


def own_probe(path: Path) -> None:
    """Write a small probe with all that `onepolicy audit` reads, and more, as older versions
    did."""
    n = 8
    floats = ("logp_rollout", "logp_trainer", "logp_trainer_native")
    tensors = {name: -np.linspace(0.1, 2, n, dtype=np.float32) for name in floats}
    tensors["entropy"] = np.linspace(0.1, 2, n, dtype=np.float32)
    tensors |= {"version": np.zeros(n, np.int32), "tokens": np.arange(n)}
    tensors |= {"segment": np.arange(n) // 4, "experts_differing": np.array([5, 2, 1])}
    tensors["disagree_per_token"] = np.arange(n, dtype=np.int32)
    tensors["disagree_per_layer"] = np.full(2, 0.1, np.float32)
    tensors["routes_rollout"] = np.zeros((n, 2, 2), np.int32)
    tensors["routes_trainer"] = tensors["routes_rollout"]
    fast = json.dumps({"numerics": "fast"})
    about = {"fingerprint": fast, "rollout": json.dumps([fast])}
    save_file(tensors, path, metadata=about)
