"""The cost of training on older tokens, on the tiny policy: mismatch, and the ages and rates at
which it still learns.

    onepolicy make-policy
    python benchmarks/staleness.py --seeds 0 1  # every age, rate and correction; until done
    python benchmarks/staleness.py --show --figures docs/figures --png

Trains one step after the other with an engine that is given the weights of K updates ago. Every
token has that age, however busy the machine is. Settings are those of quant_table.toml (32
sequences a step) with R3; every fourth batch is also scored without replay. After the last step the
newest weights answer 128 held-out problems twice. A run's rows are kept in --out, and finished runs
are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from turn_tables import markdown

from onepolicy.build.components import build_components
from onepolicy.config import load
from onepolicy.interfaces import NamedWeights, RolloutEngine
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.report.figures.parts import (
    NEUTRAL,
    REPLAY,
    TRAINER,
    Figure,
    LineStyle,
    LogScale,
    axis,
    line,
)
from onepolicy.report.png import write_figures
from onepolicy.run.evaluate import evaluate
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepTimer, sample_rollouts, train_on_rollouts
from onepolicy.run.step_metrics import mismatch_metrics
from onepolicy.sync.push import push_weights
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Sampling

RECIPE = Path(__file__).with_name("quant_table.toml")
AGES, RATES = (0, 1, 2, 4, 8), (3e-5, 1e-4)
CORRECTIONS = {"none": "recompute", "TIS": "tis"}
EVERY, WARM, LAST = (
    4,
    20,
    10,
)  # steps between scorings without replay; before any is counted; of the reward
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Arm:
    age: int
    rate: float
    correction: str

    def path(self, out: Path, seed: int) -> Path:
        return out / f"age{self.age}-{self.rate:g}-{CORRECTIONS[self.correction]}-seed{seed}.json"


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    every = itertools.product(options.ages, options.rates, options.corrections)
    arms = [
        Arm(*each) for each in every if each[0] or each[2] == "none"
    ]  # TIS has nothing to do at age 0
    end = time.monotonic() + 60 * options.minutes
    for seed, arm in [] if options.show else itertools.product(options.seeds, arms):
        path = arm.path(options.out, seed)
        if not path.exists() and time.monotonic() < end:
            path.write_text(json.dumps(asyncio.run(aged(arm, seed, options.steps))))
    found = {arm: runs for arm in arms if (runs := finished(arm, options.out, options.seeds))}
    if found:
        print(markdown(mismatch_rows(found)), markdown(learning_rows(found)), sep="\n\n")
    if found and options.figures:
        for path in write_figures(
            options.figures, [mismatch_figure(found), learning_figure(found)], png=options.png
        ):
            print(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--show", action="store_true", help="run nothing: tables and figures of what is there"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ages", type=int, nargs="+", default=AGES, help="in updates")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run later than this"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--png", action="store_true")
    return parser.parse_args()


class Aged:
    """An engine that samples with the weights of `age` updates ago, or with the first weights if
    there are fewer."""

    def __init__(self, engine: RolloutEngine, age: int) -> None:
        self.engine, self.caps, self.version = engine, engine.caps, engine.version
        self._kept: deque[tuple[int, list]] = deque(maxlen=age + 1)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        return await self.engine.generate(prompt_ids, sampling, seed=seed)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        self._kept.append((version, [(name, tensor.detach().clone()) for name, tensor in weights]))
        old, tensors = self._kept[0]
        await self.engine.load_weights(tensors, old)
        self.version = version

    async def reset_cache(self) -> None:
        await self.engine.reset_cache()


async def aged(arm: Arm, seed: int, steps: int) -> Row:
    """Train on rollouts that are `arm.age` updates old. Return the metrics of each step, and a
    held-out score at the end."""
    # routes this old may look like those of other tokens, which would stop a run
    settings = [
        "out=unused",
        f"steps={steps}",
        f"seed={seed}",
        f"optim.lr={arm.rate}",
        "model.path=tiny",
    ]
    settings += [
        "replay.mode=r3",
        "replay.min_agreement=0",
        f"correction.preset={CORRECTIONS[arm.correction]}",
    ]
    config = load(RECIPE, settings)
    parts, _ = build_components(config)
    parts = dataclasses.replace(parts, engine=Aged(parts.engine, arm.age))
    await push_weights(parts.learner, parts.engine)
    rows, hooks = [], build_hooks(parts)
    for step in range(steps):
        rollouts = await sample_rollouts(parts, step)
        row: Row = {"step": step}
        if step % EVERY == EVERY - 1:
            groups = compute_outcomes(
                rollouts.groups, config.objective, max_tokens=config.rollout.sampling.max_tokens
            )
            native = mismatch_metrics(parts.learner.scorer.score(pack(groups), replay=False))
            row |= {f"native/{name}": value for name, value in native.items()}
        row |= train_on_rollouts(parts, hooks, step, rollouts, StepTimer()).metrics
        await push_weights(parts.learner, parts.engine)
        rows.append(row)
        print(arm, seed, step, f"{row['train/reward']:.2f} {row['mismatch/k3']:.1e}", flush=True)
    newest = parts.engine.engine
    await push_weights(parts.learner, newest)
    most = config.rollout.sampling.max_tokens
    scores = await evaluate(
        newest, parts.environment, config.eval, stop=parts.sampling.stop, max_tokens=most
    )
    return {"rows": rows, "scores": scores}


def finished(arm: Arm, out: Path, seeds: Sequence[int]) -> list[Row]:
    return [
        json.loads(path.read_text()) for seed in seeds if (path := arm.path(out, seed)).exists()
    ]


def settled(run: Row) -> list[Row]:
    """Return the steps whose tokens have the age of the run, with the learning rate warm."""
    return run["rows"][WARM:]


def mean(runs: list[Row], name: str) -> float:
    return statistics.fmean(row[name] for run in runs for row in settled(run) if name in row)


def mismatch_rows(found: dict[Arm, list[Row]]) -> list[tuple[str, ...]]:
    """Return means over steps and seeds."""
    rows: list[tuple[str, ...]] = []
    for arm, runs in found.items():
        cells = []
        for prefix in ("", "native/"):
            for name, form in (("k3", ".1e"), ("f2", ".2%"), ("ess", ".3f")):
                cells.append(f"{mean(runs, f'{prefix}mismatch/{name}'):{form}}")
        cells += [
            f"{mean(runs, 'routing/routers'):.1%}",
            f"{mean(runs, 'correction/weight_ess'):.3f}",
            str(len(runs)),
        ]
        rows.append((f"{arm.rate:g}", str(arm.age), arm.correction, *cells))
    both = [f"{name}, {way}" for way in ("R3", "no replay") for name in ("k3", "F(2)", "ESS")]
    header = (
        "rate",
        "updates old",
        "correction",
        *both,
        "routes that differ",
        "ESS of the weights",
        "seeds",
    )
    return [header, *sorted(rows, key=lambda row: (float(row[0]), int(row[1])))]


VALUES: dict[str, Callable[[Row], float]] = {
    "held-out": lambda run: run["scores"]["eval/avg@2"],
    f"reward, last {LAST} steps": lambda run: reward(run["rows"][-LAST:]),
    f"worst {LAST} steps": lambda run: min(
        reward(run["rows"][i : i + LAST]) for i in range(len(run["rows"]) - LAST)
    ),
}


def learning_rows(found: dict[Arm, list[Row]]) -> list[tuple[str, ...]]:
    """Return the rows of every seed, uncorrected beside TIS."""
    rows = []
    for rate, age in sorted({(arm.rate, arm.age) for arm in found}):
        cells = []
        for value, correction in itertools.product(VALUES.values(), CORRECTIONS):
            cells.append(
                ", ".join(f"{value(run):.2f}" for run in found.get(Arm(age, rate, correction), []))
            )
        rows.append((f"{rate:g}", str(age), *cells))
    names = (
        f"{name}, {'no correction' if way == 'none' else way}"
        for name, way in itertools.product(VALUES, CORRECTIONS)
    )
    return [("rate", "updates old", *names), *rows]


def reward(rows: list[Row]) -> float:
    return statistics.fmean(row["train/reward"] for row in rows)


def mismatch_figure(found: dict[Arm, list[Row]]) -> Figure:
    """Draw the mismatch of the uncorrected runs."""
    rates, curves = sorted({arm.rate for arm in found}), []
    for rate, (way, prefix, look) in itertools.product(
        rates, (("R3", "", REPLAY), ("no replay", "native/", TRAINER))
    ):
        runs = {
            arm.age: runs
            for arm, runs in found.items()
            if (arm.rate, arm.correction) == (rate, "none")
        }
        points = [(age, mean(of, f"{prefix}mismatch/k3")) for age, of in runs.items()]
        curves.append((f"{way}, rate {rate:g}", of_rate(look, rate == rates[0]), points))
    scale = LogScale.of(*([value for _, value in points] for _, _, points in curves))
    layout = {"xaxis": axis("updates old", dtick=1), "yaxis": scale.axis("k3 (nats per token)")}
    note = (
        "k3 of the rollout's tokens under the weights that train on them, no correction; "
        "bfloat16 rollouts, float32 "
        f"trainer, mean from step {WARM + 1} on. "
        f"The same batches scored with the rollout's experts and with the "
        "trainer's own."
    )
    title = "How fast age outgrows the engines' difference is a matter of the learning rate"
    return Figure("asynchronous_k3", title, note, drawn(curves), layout)


def learning_figure(found: dict[Arm, list[Row]]) -> Figure:
    rates, curves = sorted({arm.rate for arm in found}), []
    for rate, (correction, look) in itertools.product(rates, (("none", NEUTRAL), ("TIS", REPLAY))):
        runs = {
            arm.age: runs
            for arm, runs in found.items()
            if (arm.rate, arm.correction) == (rate, correction)
        }
        points = [
            (age, statistics.fmean(run["scores"]["eval/avg@2"] for run in of))
            for age, of in runs.items()
        ]
        name = "no correction" if correction == "none" else correction
        curves.append((f"{name}, rate {rate:g}", of_rate(look, rate == rates[0]), points))
    layout = {
        "xaxis": axis("updates old", dtick=1),
        "yaxis": axis("held-out accuracy", rangemode="tozero"),
    }
    steps = max(len(run["rows"]) for runs in found.values() for run in runs)
    note = (
        f"Newest weights after {steps} steps on tokens of that age, R3: 128 problems, "
        f"2 samples each; seeds averaged."
    )
    title = "The older the tokens, the lower the learning rate that still learns"
    return Figure("asynchronous_learning", title, note, drawn(curves), layout)


def of_rate(look: LineStyle, lower: bool) -> LineStyle:
    """Return the line style of a rate: dotted for the lower rate, open markers for the higher
    one."""
    dash, symbol = ("dot", look.symbol) if lower else ("solid", f"{look.symbol}-open")
    return LineStyle(look.color, dash, symbol, look.pattern)


def drawn(curves: list[tuple[str, LineStyle, list[tuple[int, float]]]]) -> list[dict[str, Any]]:
    return [
        line(
            name,
            [x for x, _ in points],
            [y for _, y in points],
            look,
            mode="lines+markers",
            marker={"symbol": look.symbol},
        )
        for name, look, points in curves
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
