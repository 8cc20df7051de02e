"""Interaction scaling: reward against the number of allowed turns, with and without replay, on
paired seeds.

One policy and one task (turn_task.py, turn_curves.toml); for every seed, every number of allowed
turns and every arm one run, and an evaluation of its last weights under the same limit. Finished
runs are kept and an interrupted one is resumed, so the script can be stopped and started again.
Seeds come one after the other, so that finished runs are paired.

    python benchmarks/turn_curves.py                          # everything: 45 runs, then the tables
    python benchmarks/turn_curves.py --bits 4 --turns 16 8 2  # rollouts with 4-bit weights
    python benchmarks/turn_curves.py --pressure 1 --turns 16 4 1 --arms off r3 \\
        --seeds 110 111 --results benchmarks/evidence/turns_pressure.jsonl
    python benchmarks/turn_curves.py --show --figures docs/figures --png    # the finished runs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

from turn_tables import Outcome, figures, k3_table, tables
from turn_task import HELD_OUT, make_data, make_policy

from onepolicy.config import EvalConfig, RunConfig, load
from onepolicy.config.stored_config import read_stored_config
from onepolicy.interfaces import Progress
from onepolicy.report.png import write_figures
from onepolicy.run import resume
from onepolicy.run import train as loop
from onepolicy.run.eval_command import evaluate_model
from onepolicy.run.log import read_metrics

RECIPE = Path(__file__).with_suffix(".toml")
ARMS = {
    "off": ("replay.mode=off", "correction.preset=recompute"),
    "r3": ("replay.mode=r3", "correction.preset=recompute"),
    "off + tis": ("replay.mode=off", "correction.preset=tis"),
}
# What a change of the last bits of the gradient does to a run: the same arm, its gradient summed in
# another order.
CONTROL = ("off, reordered", (*ARMS["off"], "train.tokens_per_micro_batch=4096"))
TURNS = (16, 8, 4, 2, 1)
# What a line of --results keeps of a step: names that begin so
KEPT = ("train/reward", "mismatch/k3", "counterfactual/mismatch/k3", "train/tokens_turn@")
KEPT += ("routing/routers", "train/grad_norm", "time/step")
JUDGED = EvalConfig(problems=HELD_OUT, greedy=True, k=2)


def main() -> None:
    options = arguments()
    arms = [arm for arm in ARMS if arm in options.arms]
    jobs = [(arm, turns, seed) for seed in options.seeds for turns in options.turns for arm in arms]
    if options.control:
        jobs += [(CONTROL[0], max(options.turns), seed) for seed in options.seeds]
    found, suffix, kept = [], name_of_setting(options), read_results(options.results)
    for arm, turns, seed in jobs:
        run = options.out / f"{re.sub('[^a-z0-9]+', '-', arm)}{suffix}-turns{turns}-seed{seed}"
        if run.name in kept:
            found.append(kept[run.name])
            continue
        if not options.show:
            play(options.out, run, arm, turns, seed, engine_settings(options, arm, seed))
        if (run / "eval.json").exists():
            found.append(outcome(run, arm, turns, seed))
            if options.results:
                add_result(options.results, run.name, found[-1])
    there = Counter((each.turns, each.seed) for each in found if each.arm in arms)
    paired = [each for each in found if there[each.turns, each.seed] == len(arms)]
    if "r3" not in options.arms:
        print(k3_table(paired))
        return
    print(tables(paired))
    if options.figures:
        drawn = [
            dataclasses.replace(each, name=each.name + suffix.replace("-", "_"))
            for each in figures(paired)
        ]
        for path in write_figures(options.figures, drawn, png=options.png):
            print(path)


def name_of_setting(options: argparse.Namespace) -> str:
    """Return the part of a run folder's name that says what was done to the engine."""
    if options.bits:
        return f"-{options.bits}bit"
    if options.pressure:
        return f"-pressure{options.pressure:g}"
    return ""


def engine_settings(options: argparse.Namespace, arm: str, seed: int) -> list[str]:
    """Return what is done to the engine: rounded weights, or noise on its routers' choices."""
    if options.bits:
        return [f'rollout.quant={{format="simulated",bits={options.bits}}}']
    if not options.pressure:
        return []
    pressed = [
        "rollout.engine.dtype=float32",
        f"rollout.pressure.scale={options.pressure}",
        f"rollout.pressure.seed={1000 + seed}",
    ]
    if arm == "r3":
        pressed.append("replay.min_agreement=0")
    return pressed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--turns", nargs="+", type=int, default=TURNS, metavar="N")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/turns"),
        help="task, policy, runs (default: runs/turns)",
    )
    parser.add_argument(
        "--bits", type=int, metavar="N", help="round the rollout engine's weights to so many bits"
    )
    parser.add_argument(
        "--pressure", type=float, metavar="SCALE", help="noise on the engine's choice of experts"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="a line per run; none that is there is played"
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument(
        "--control", action="store_true", help="and, with most turns, `off` summed in another order"
    )
    parser.add_argument(
        "--show", action="store_true", help="train nothing: tables and figures of what is there"
    )
    parser.add_argument("--figures", type=Path, help="folder for the figures as plotly JSON")
    parser.add_argument("--png", action="store_true", help="and as PNG")
    options = parser.parse_args()
    if options.bits and options.pressure:
        parser.error("--bits and --pressure: one change of the engine at a time")
    return options


def play(folder: Path, run: Path, arm: str, turns: int, seed: int, engine: list[str]) -> None:
    """Train and judge one run in this process, on one thread. Starting a process would cost as much
    as a short run."""
    make_data(folder)
    corpus = f'[{{kind="search",corpus="{folder}/corpus.jsonl",passages=1}}]'
    task = (
        f"task.problems.path={folder}/problems.jsonl",
        f"task.tools={corpus}",
        f"task.max_turns={turns}",
    )
    settings = [
        f"model.path={make_policy(folder)}",
        f"out={run}",
        f"seed={seed}",
        *task,
        *ARMS.get(arm, CONTROL[1]),
        *engine,
    ]
    if not (run / "summary.json").exists():
        if any(run.glob("checkpoints/step_*")):
            resume.resume_run(run, Progress())
        else:
            shutil.rmtree(run, ignore_errors=True)  # stopped before its checkpoint
            loop.start_run(load(RECIPE, settings), Progress())
    path = run / "eval.json"
    if not path.exists():
        config = RunConfig.model_validate(read_stored_config(run).model_dump() | {"eval": JUDGED})
        path.write_text(json.dumps(evaluate_model(config, run, None)))
        print(f"{run.name}: {path.read_text()}", flush=True)


def outcome(run: Path, arm: str, turns: int, seed: int) -> Outcome:
    rows = [row for row in read_metrics(run) if "train/reward" in row]
    return Outcome(arm, turns, seed, rows, json.loads((run / "eval.json").read_text()))


def read_results(path: Path | None) -> dict[str, Outcome]:
    """Return the outcomes of a file of --results, by the names of their runs."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line.pop("run"): Outcome(**line) for line in lines}


def add_result(path: Path, name: str, found: Outcome) -> None:
    rows = [
        {key: value for key, value in row.items() if key.startswith(KEPT)} for row in found.rows
    ]
    line = {"run": name} | dataclasses.asdict(dataclasses.replace(found, rows=rows))
    with path.open("a") as results:
        results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
