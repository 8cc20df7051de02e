"""The gain of sampling while learning, on the tiny policy. The cost of older tokens is in
staleness.py.

    onepolicy make-policy
    python benchmarks/asynchronous.py --speed           # seconds per step, of runs in turn
    python benchmarks/asynchronous.py --elsewhere 4     # an engine that costs this machine nothing
    python benchmarks/asynchronous.py --speed --server dtype=bfloat16 max_num_seqs=64 \
      kv_cache_gib=0.25 block_size=32
    python benchmarks/asynchronous.py --show            # tables of the finished runs

`--speed` runs `onepolicy train` in processes of their own, one after the other, and leaves out the
steps in which the pipeline fills. With `--server` their engine is a vLLM server in a process of its
own, which this script starts with these settings and ends. `--elsewhere SECONDS` has an engine
whose requests take up to that long and compute nothing, as if it sampled on other hardware; the
loops take turns in one process. Rows are kept in --out, and finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from turn_tables import markdown

from onepolicy.build.components import build_components
from onepolicy.config import load
from onepolicy.interfaces import NamedWeights, RolloutEngine
from onepolicy.run.async_rollouts import RolloutPrefetcher
from onepolicy.run.hooks import build_hooks
from onepolicy.run.log import read_metrics
from onepolicy.run.step import StepRunner
from onepolicy.types import Completion, Sampling

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
SMALL = (
    "rollout.prompts_per_step=8",
    "rollout.engine.max_num_seqs=64",
    "train.threads=1",
    "optim.lr_decay=none",
)
QUIET = ("eval.every=0", "log.tensorboard=false", "log.report=false", "log.counterfactual_every=0")
SPEED = {  # name -> settings
    "one after the other, 1 thread": ("train.threads=1",),
    "one after the other, 2 threads": ("train.threads=2",),
    "max_staleness = 1, 1 thread each": ("train.threads=1", "rollout.max_staleness=1"),
    "max_staleness = 2, 1 thread each": ("train.threads=1", "rollout.max_staleness=2"),
}
SERVED = {  # the learner has one thread
    "one after the other": (),
    "max_staleness = 1": ("rollout.max_staleness=1",),
    "max_staleness = 2": ("rollout.max_staleness=2",),
}
PARTS = ("step", "rollout", "wait", "score", "update", "sync")
START_S = 600  # that the server may take
FILLING, COUNTED = 3, 3  # first steps, left out; steps counted in a turn of --elsewhere
Row = dict[str, Any]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or a server would outlive this
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.speed:
        with (
            nullcontext(())
            if options.server is None
            else served(options.server, options.out) as engine
        ):
            for repeat, (i, settings) in itertools.product(
                range(options.repeats), enumerate(rows_of(options).values())
            ):
                run = options.out / f"{kind_of(options)}{i}-{repeat}"
                train(run, options.steps, (*settings, *engine, *options.set))
    if options.elsewhere:
        rows = asyncio.run(elsewhere(options.elsewhere, options.repeats))
        (options.out / "elsewhere.json").write_text(json.dumps(rows))
    if found := speed_table(speed_runs(options)):
        print(markdown(found))
    if (path := options.out / "elsewhere.json").exists():
        print(markdown(speed_table(json.loads(path.read_text()))))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", action="store_true")
    parser.add_argument(
        "--elsewhere",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="that the longest request takes",
    )
    parser.add_argument(
        "--show", action="store_true", help="measure nothing: tables of what is there"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2, help="of --speed")
    parser.add_argument(
        "--server",
        nargs="+",
        metavar="a=b",
        help="of --speed: a vLLM server's settings, as engine serve",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="a.b=c", help="of --speed: of every run"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/asynchronous"))
    return parser.parse_args()


def train(out: Path, steps: int, settings: Sequence[str]) -> None:
    if (out / "summary.json").exists():
        return
    run = [
        "train",
        str(RECIPE),
        f"out={out}",
        f"steps={steps}",
        *SMALL,
        *QUIET,
        "checkpoint.every=1000",
        *settings,
    ]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-m", "onepolicy", *run], check=True, env=environment)


@contextmanager
def served(settings: Sequence[str], out: Path) -> Iterator[tuple[str, ...]]:
    """Start a vLLM server of the tiny policy in a process of its own, and yield the settings of
    runs on it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "onepolicy",
        "engine",
        "serve",
        "--port",
        str(port),
        "tiny",
        *settings,
    ]
    log = out / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_S
        while "ready after" not in log.read_text():
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(log.read_text())
            time.sleep(0.5)
        yield ("rollout.engine.kind=vllm-server", f"rollout.engine.url=http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait(60)


class Elsewhere:
    """An engine on other hardware: random tokens, after the time it would take to sample them one
    by one."""

    def __init__(self, engine: RolloutEngine, seconds: float) -> None:
        self.caps, self.version, self.seconds = engine.caps, 0, seconds

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        version, draw = self.version, random.Random(seed)
        count = draw.randrange(sampling.max_tokens // 2, sampling.max_tokens + 1)
        await asyncio.sleep(self.seconds * count / sampling.max_tokens)
        tokens = torch.tensor([draw.randrange(3, 10) for _ in range(count)], dtype=torch.int32)
        return Completion(
            tokens, torch.full((count,), -2.0), torch.full_like(tokens, version), "length"
        )

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        self.version = version

    async def reset_cache(self) -> None: ...


async def elsewhere(seconds: float, rounds: int) -> dict[str, list[Row]]:
    """Return name -> metrics of the counted steps. The loops take turns."""
    tiny = ("rollout.prompts_per_step=2", "replay.mode=off", "correction.preset=recompute")
    config = load(RECIPE, ["out=unused", "steps=1000", *SMALL, *tiny])
    parts, _ = build_components(config)
    parts = dataclasses.replace(parts, engine=Elsewhere(parts.engine, seconds))
    found: dict[str, list[Row]] = {}
    step = 0
    for _ in range(rounds):
        for most in (None, 1, 2):
            rollout = config.rollout.model_copy(update={"max_staleness": most})
            mine = dataclasses.replace(parts, config=config.model_copy(update={"rollout": rollout}))
            runner = StepRunner(mine, build_hooks(mine))
            name = "one after the other" if most is None else f"max_staleness = {most}"
            async with (
                nullcontext() if most is None else RolloutPrefetcher(runner, step) as prefetcher
            ):
                for i in range(FILLING + COUNTED):
                    if prefetcher is None:
                        result = await runner.rl_step(step)
                    else:
                        result = await prefetcher.run_step(step)
                    step += 1
                    if i >= FILLING:
                        found.setdefault(name, []).append(result.metrics)
                        print(name, f"{result.metrics['time/step']:.2f} s", flush=True)
    return found


def kind_of(options: argparse.Namespace) -> str:
    return "speed" if options.server is None else "server"


def rows_of(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    return SPEED if options.server is None else SERVED


def speed_runs(options: argparse.Namespace) -> dict[str, list[Row]]:
    found = {}
    for i, name in enumerate(rows_of(options)):
        runs = [
            options.out / f"{kind_of(options)}{i}-{repeat}" for repeat in range(options.repeats)
        ]
        rows = [
            row
            for run in runs
            if (run / "summary.json").exists()
            for row in read_metrics(run)[FILLING:]
        ]
        if rows:
            found[name] = rows
    return found


def speed_table(found: dict[str, list[Row]]) -> list[tuple[str, ...]]:
    """Return medians over all counted steps, and slots per second relative to the first row."""
    lines: list[tuple[str, ...]] = []
    first = 0.0
    for name, rows in found.items():
        rate = statistics.median(row["train/tokens_per_second"] for row in rows)
        first = first or rate
        seconds = [
            f"{statistics.median(row.get(f'time/{part}', 0.0) for row in rows):.2f}"
            for part in PARTS
        ]
        learner = statistics.median(learner_busy(row) for row in rows)
        sampler = statistics.median(sampler_busy(row) for row in rows)
        old = statistics.fmean(row.get("staleness/mean", 0.0) for row in rows)
        spanning = statistics.fmean(row.get("staleness/spanning", 0.0) for row in rows)
        more = [
            f"{rate / first:.2f}",
            f"{learner:.0%}",
            f"{sampler:.0%}",
            f"{old:.2f}",
            f"{spanning:.0%}",
        ]
        lines.append((name, *seconds, *more, str(len(rows))))
    header = (
        "",
        *(f"{part} [s]" for part in PARTS),
        "slots/s of the first",
        "learner busy",
        "sampler busy",
    )
    return [(*header, "mean age", "samples spanning an update", "steps"), *lines] if lines else []


def learner_busy(row: Row) -> float:
    own = (row.get(f"time/{part}", 0.0) for part in ("score", "counterfactual", "update"))
    return row.get("async/learner_busy", sum(own) / row["time/step"])


def sampler_busy(row: Row) -> float:
    return row.get("async/sampler_busy", row.get("time/rollout", 0.0) / row["time/step"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
