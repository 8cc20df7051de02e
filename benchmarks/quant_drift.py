"""Drift under RL and under supervised fine-tuning: do activation scales calibrated once stay good
(FlashRL)?

    python benchmarks/quant_drift.py --steps 20 --out runs/quant_drift

From one policy: RL with static int8 rollouts, and supervised steps on right answers of the same
task, as many optimiser steps, at RL's learning rate and at 10 times that. Then all weights sample
the same problems in an engine that has the scales of the first policy: the largest activation of
each layer over the calibrated one, and the share that is cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import torch
from gym_curves import ROOT, train

from onepolicy.build.calibrate import CALIBRATION_FILE, calibrate, play_episodes
from onepolicy.build.components import build_environment
from onepolicy.build.engines import build_engine
from onepolicy.config import ModelConfig, RunConfig, load
from onepolicy.config.input_files import resolve_model
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import warmup_examples
from onepolicy.models.load import load_model, load_tokenizer
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.spec import EngineSpec
from onepolicy.tiny.model import save_policy, warm_up
from onepolicy.train.checkpoint import checkpoint_folder

RECIPE = ROOT / "recipes" / "quant_int8.toml"
STATIC = 'rollout.quant={format="int8", activations="static"}'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--out", type=Path, default=Path("runs/quant_drift"))
    parser.add_argument("--settings", nargs="*", default=[], metavar="a.b=c", help="of the RL run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [
        STATIC,
        "train.threads=1",
        f"steps={options.steps}",
        f"checkpoint.every={options.steps}",
    ]
    settings = [*every, "eval.every=0", "optim.lr_decay=none", *options.settings]
    run = options.out / "rl"
    train(RECIPE, options.model, run, 0, 1, settings)
    config = load(RECIPE, [*settings, f"model.path={options.model}", "out=unused"])
    start = resolve_model(config.model)
    trained = {
        "start": Path(start.path),
        f"RL, lr {config.optim.lr:g}": checkpoint_folder(run, options.steps),
    }
    for factor in (1, 10):
        rate = factor * config.optim.lr
        path = options.out / f"sft-{rate:g}"
        if not path.exists():
            fine_tune(start, path, rate, options.steps)
        trained[f"SFT, lr {rate:g}"] = path
    print(
        "| weights | relative change | drift, mean | drift, largest | clipped |\n|" + " --- |" * 5
    )
    for name, path in trained.items():
        found = staleness(config, path, run / CALIBRATION_FILE)
        numbers = (found[f"quant/{key}"] for key in ("drift_mean", "drift_max", "clipped"))
        mean, largest, clipped = numbers
        print(
            f"| {name} | {change(start, path):.2g} | {mean:.3f} | {largest:.3f} | {clipped:.2g} |",
            flush=True,
        )


def fine_tune(start: ModelConfig, path: Path, lr: float, steps: int) -> None:
    model, tokenizer = load_model(start, torch.float32, torch.device("cpu")), load_tokenizer(start)
    own = PolicyConfig(
        lr=lr, steps=steps, warmup_steps=4, tokens_per_step=8192, mistakes=0.0, seed=1
    )
    warm_up(
        model,
        tokenizer,
        lambda mistakes: warmup_examples(own.task, mistakes=mistakes, seed=own.seed),
        own,
    )
    save_policy(model, tokenizer, own, path)


def staleness(config: RunConfig, path: Path, scales: Path) -> dict[str, float]:
    """Return the staleness of the weights in `path` under the first policy's scales."""
    model, quant = ModelConfig(path=str(path)), config.rollout.quant
    environment, tokenizer, max_len = build_environment(config, model)
    device, stop = torch.device("cpu"), (tokenizer.eos_token_id,)
    engine = build_engine(EngineSpec(model, config.rollout.engine, device, max_len, quant=quant))
    assert isinstance(engine, HFEngine)
    assert engine.quantised is not None
    asyncio.run(
        calibrate(config, engine, environment, stop, None)
    )  # the same problems, each layer's largest value
    own, first = engine.quantised.scales(), json.loads(scales.read_text())
    engine.quantised.use_scales(first)
    asyncio.run(play_episodes(config, engine, environment, stop))
    drift = [own[name] / first[name] for name in own]
    clipped = engine.take_metrics()["quant/clipped"]
    return {
        "quant/drift_mean": sum(drift) / len(drift),
        "quant/drift_max": max(drift),
        "quant/clipped": clipped,
    }


def change(start: ModelConfig, path: Path) -> float:
    """Return |new - old| / |old| over all weights."""
    cpu, paths = torch.device("cpu"), (start.path, str(path))
    first, last = (
        load_model(ModelConfig(path=each), torch.float32, cpu).state_dict() for each in paths
    )
    moved = sum((last[name] - first[name]).square().sum() for name in first)
    return float((moved / sum(each.square().sum() for each in first.values())).sqrt())


if __name__ == "__main__":
    main()
