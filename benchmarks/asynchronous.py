"""What sampling while learning gains, and what training on older tokens costs, on the tiny policy.

    onepolicy make-policy
    python benchmarks/asynchronous.py --speed                # seconds per step and who is busy, of runs in turn
    python benchmarks/asynchronous.py --elsewhere 4          # the same, with an engine that costs this machine nothing
    python benchmarks/asynchronous.py --mismatch             # k3, F(2), ESS of tokens exactly K updates old
    python benchmarks/asynchronous.py --show --figures docs/figures --png

`--speed` runs `onepolicy train` in processes of their own, one after the other, and leaves out the steps in which the
pipeline fills. `--elsewhere SECONDS` has an engine whose requests take up to that long and compute nothing, as if it
sampled on other hardware; the loops take turns in one process. `--mismatch` trains one step after the other with an
engine that is given the weights of K updates ago, so that age does not depend on how busy the machine is; each batch is
scored with and without the rollout's experts.
Rows are kept in --out, and what is there is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from turn_tables import markdown

from onepolicy.config import load
from onepolicy.interfaces import RolloutEngine, Weights
from onepolicy.loop.asynchronous import Ahead, asynchronous_step
from onepolicy.loop.metrics import read_metrics
from onepolicy.loop.probe import measure
from onepolicy.loop.setup import build_parts
from onepolicy.loop.step import Clock, learn, rl_step, sample
from onepolicy.objective.advantages import outcomes
from onepolicy.report.figure import REPLAY, TRAINER, Figure, LogScale, Look, axis, line
from onepolicy.report.png import write_figures
from onepolicy.sync.local import push_weights
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Sampling

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SMALL = ("rollout.prompts_per_step=8", "rollout.engine.slots=64", "train.threads=1", "optim.decay=none")
QUIET = ("eval.every=0", "log.tensorboard=false", "log.report=false", "log.counterfactual_every=0")
AGES = (0, 1, 2, 4, 8)
ARMS = {"no correction": "recompute", "TIS": "tis"}
WAYS = {"R3": ("", REPLAY), "no replay": ("native/", TRAINER)}  # prefix of the metrics, look
SPEED = {  # name -> settings
    "one after the other, 1 thread": ("train.threads=1",),
    "one after the other, 2 threads": ("train.threads=2",),
    "max_staleness = 1, 1 thread each": ("train.threads=1", "rollout.max_staleness=1"),
    "max_staleness = 2, 1 thread each": ("train.threads=1", "rollout.max_staleness=2"),
}
PARTS = ("step", "rollout", "wait", "score", "update", "sync")
FILLING, COUNTED = 3, 3  # first steps, left out; steps counted in a turn of --elsewhere
Row = dict[str, Any]


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.speed:
        for repeat in range(options.repeats):
            for i, settings in enumerate(SPEED.values()):
                train(options.out / f"speed{i}-{repeat}", options.steps, (*settings, *options.set))
    if options.elsewhere:
        rows = asyncio.run(elsewhere(options.elsewhere, options.repeats))
        (options.out / "elsewhere.json").write_text(json.dumps(rows))
    if options.mismatch:
        for age in options.ages:
            for arm in ARMS:
                path = options.out / f"age{age}-{ARMS[arm]}.jsonl"
                if not path.exists():
                    rows = asyncio.run(aged(age, ARMS[arm], options.steps))
                    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if found := speed_table(speed_runs(options.out, options.repeats)):
        print(markdown(found))
    if (path := options.out / "elsewhere.json").exists():
        print(markdown(speed_table(json.loads(path.read_text()))))
    if found := mismatch_rows(options.out):
        print(markdown(found))
        if options.figures:
            for path in write_figures(options.figures, [figure(options.out)], png=options.png):
                print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--mismatch", action="store_true")
    parser.add_argument(
        "--elsewhere", type=float, default=0.0, metavar="SECONDS", help="that the longest request takes"
    )
    parser.add_argument("--show", action="store_true", help="measure nothing: tables and figure of what is there")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2, help="of --speed")
    parser.add_argument("--ages", type=int, nargs="+", default=AGES, help="of --mismatch, in updates")
    parser.add_argument("--set", nargs="*", default=[], metavar="a.b=c", help="of --speed: another engine, for example")
    parser.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--png", action="store_true")
    return parser.parse_args()


def train(out: Path, steps: int, settings: Sequence[str]) -> None:
    if (out / "summary.json").exists():
        return
    run = ["train", str(RECIPE), f"out={out}", f"steps={steps}", *SMALL, *QUIET, "checkpoint.every=1000", *settings]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-m", "onepolicy.cli", *run], check=True, env=environment)


class Aged:
    """An engine that samples with the weights of `age` updates ago; before there are as many, with the first."""

    def __init__(self, engine: RolloutEngine, age: int) -> None:
        self.engine, self.caps, self.version = engine, engine.caps, engine.version
        self._kept: deque[tuple[int, list]] = deque(maxlen=age + 1)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, weights: Weights, version: int) -> None:
        self._kept.append((version, [(name, tensor.detach().clone()) for name, tensor in weights]))
        old, tensors = self._kept[0]
        await self.engine.load_weights(tensors, old)
        self.version = version

    async def reset_cache(self) -> None:
        await self.engine.reset_cache()


async def aged(age: int, correction: str, steps: int) -> list[Row]:
    """Trains `steps` steps on rollouts that are `age` updates old; the metrics of each."""
    # routes this old may look like those of other tokens, which would stop a run
    config = load(
        RECIPE,
        ["out=unused", f"steps={steps}", *SMALL, f"correction.preset={correction}", "replay.min_agreement=0"],
    )
    parts, _ = build_parts(config)
    parts = dataclasses.replace(parts, engine=Aged(parts.engine, age))
    await push_weights(parts.learner, parts.engine)
    rows = []
    for step in range(steps):
        rollouts = await sample(parts, step)
        groups = outcomes(rollouts.groups, config.objective, max_tokens=config.rollout.sampling.max_tokens)
        native = measure(parts.learner.score_without_replay(pack(groups)))
        metrics = learn(parts, step, rollouts, Clock(), probe=False).metrics
        await push_weights(parts.learner, parts.engine)
        rows.append({"step": step, **metrics, **{f"native/{name}": value for name, value in native.items()}})
        print(age, correction, step, f"{metrics['train/reward']:.2f} {metrics['mismatch/k3']:.1e}", flush=True)
    return rows


class Elsewhere:
    """An engine on other hardware: random tokens, after the time it would take to sample them one by one."""

    def __init__(self, engine: RolloutEngine, seconds: float) -> None:
        self.caps, self.version, self.seconds = engine.caps, 0, seconds

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int) -> Completion:
        version, draw = self.version, random.Random(seed)
        count = draw.randrange(sampling.max_tokens // 2, sampling.max_tokens + 1)
        await asyncio.sleep(self.seconds * count / sampling.max_tokens)
        tokens = torch.tensor([draw.randrange(3, 10) for _ in range(count)], dtype=torch.int32)
        return Completion(tokens, torch.full((count,), -2.0), torch.full_like(tokens, version), "length")

    async def load_weights(self, weights: Weights, version: int) -> None:
        self.version = version

    async def reset_cache(self) -> None: ...


async def elsewhere(seconds: float, rounds: int) -> dict[str, list[Row]]:
    """Name -> metrics of the counted steps; the loops take turns."""
    tiny = ("rollout.prompts_per_step=2", "replay.mode=off", "correction.preset=recompute")
    config = load(RECIPE, ["out=unused", "steps=1000", *SMALL, *tiny])
    parts, _ = build_parts(config)
    parts = dataclasses.replace(parts, engine=Elsewhere(parts.engine, seconds))
    found: dict[str, list[Row]] = {}
    step = 0
    for _ in range(rounds):
        for most in (None, 1, 2):
            rollout = config.rollout.model_copy(update={"max_staleness": most})
            mine = dataclasses.replace(parts, config=config.model_copy(update={"rollout": rollout}))
            name = "one after the other" if most is None else f"max_staleness = {most}"
            async with nullcontext() if most is None else Ahead(mine, step) as ahead:
                for i in range(FILLING + COUNTED):
                    if ahead is None:
                        result = await rl_step(mine, step, probe=False)
                    else:
                        result = await asynchronous_step(mine, ahead, step, probe=False)
                    step += 1
                    if i >= FILLING:
                        found.setdefault(name, []).append(result.metrics)
                        print(name, f"{result.metrics['time/step']:.2f} s", flush=True)
    return found


def speed_runs(out: Path, repeats: int) -> dict[str, list[Row]]:
    found = {}
    for i, name in enumerate(SPEED):
        runs = [out / f"speed{i}-{repeat}" for repeat in range(repeats)]
        rows = [row for run in runs if (run / "summary.json").exists() for row in read_metrics(run)[FILLING:]]
        if rows:
            found[name] = rows
    return found


def speed_table(found: dict[str, list[Row]]) -> list[tuple[str, ...]]:
    """Medians over all counted steps; slots per second beside those of the first row."""
    lines: list[tuple[str, ...]] = []
    first = 0.0
    for name, rows in found.items():
        rate = statistics.median(row["train/tokens_per_second"] for row in rows)
        first = first or rate
        seconds = [f"{statistics.median(row.get(f'time/{part}', 0.0) for row in rows):.2f}" for part in PARTS]
        learner = statistics.median(learner_busy(row) for row in rows)
        sampler = statistics.median(sampler_busy(row) for row in rows)
        old = statistics.fmean(row.get("staleness/mean", 0.0) for row in rows)
        spanning = statistics.fmean(row.get("staleness/spanning", 0.0) for row in rows)
        more = [f"{rate / first:.2f}", f"{learner:.0%}", f"{sampler:.0%}", f"{old:.2f}", f"{spanning:.0%}"]
        lines.append((name, *seconds, *more, str(len(rows))))
    header = ("", *(f"{part} [s]" for part in PARTS), "slots/s of the first", "learner busy", "sampler busy")
    return [(*header, "mean age", "samples spanning an update", "steps"), *lines] if lines else []


def learner_busy(row: Row) -> float:
    own = (row.get(f"time/{part}", 0.0) for part in ("score", "probe", "update"))
    return row.get("async/learner_busy", sum(own) / row["time/step"])


def sampler_busy(row: Row) -> float:
    return row.get("async/sampler_busy", row.get("time/rollout", 0.0) / row["time/step"])


def mismatch_of(out: Path) -> dict[tuple[int, str], list[Row]]:
    """(age, arm) -> rows in which tokens have that age."""
    found = {}
    for age in AGES:
        for arm, preset in ARMS.items():
            path = out / f"age{age}-{preset}.jsonl"
            rows = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
            if len(rows) > max(AGES):
                found[age, arm] = rows[max(AGES) :]
    return found


def mismatch_rows(out: Path) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for (age, arm), steps in mismatch_of(out).items():
        cells = []
        for prefix in ("", "native/"):
            for name, form in (("k3", ".1e"), ("f1.25", ".1%"), ("f2", ".2%"), ("ess", ".3f")):
                cells.append(f"{mean(steps, f'{prefix}mismatch/{name}'):{form}}")
        cells += [f"{mean(steps, 'routing/routers'):.1%}", f"{mean(steps, 'correction/weight_ess'):.3f}"]
        rows.append((str(age), arm, *cells, f"{mean(steps[-5:], 'train/reward'):.2f}"))
    both = [f"{name}, {way}" for way in ("R3", "no replay") for name in ("k3", "F(1.25)", "F(2)", "ESS")]
    header = ("age", "correction", *both, "routers that differ", "ESS of the weights", "reward, last 5")
    return [header, *rows] if rows else []


def mean(rows: list[Row], name: str) -> float:
    return statistics.fmean(row.get(name, float("nan")) for row in rows)


def figure(out: Path) -> Figure:
    found = mismatch_of(out)
    curves = []
    for arm, (way, (prefix, look)) in itertools.product(ARMS, WAYS.items()):
        points = [(age, mean(rows, f"{prefix}mismatch/k3")) for (age, of), rows in found.items() if of == arm]
        own = look if ARMS[arm] == "recompute" else Look(look.color, "solid", look.symbol, look.pattern)
        curves.append((f"{way}, {arm}", own, points))
    scale = LogScale.of(*([value for _, value in points] for _, _, points in curves))
    data = [
        line(name, [age for age, _ in points], [value for _, value in points], look) | {"mode": "lines+markers"}
        for name, look, points in curves
    ]
    layout = {"xaxis": axis("updates old", dtick=1), "yaxis": scale.axis("k3 (nats per token)")}
    note = (
        "k3 of the rollout's tokens under the weights that train on them; bfloat16 rollouts, float32 trainer, mean "
        f"from step {max(AGES) + 1} on. Each batch scored with the rollout's experts and with the trainer's own."
    )
    return Figure("asynchronous_k3", "After one update age outweighs the engines' difference", note, data, layout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
