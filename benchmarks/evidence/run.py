"""Play the runs of the study of routing mismatch, two at a time, and keep what they measured.

A run is study.toml with the settings of its arm and study (plan.toml) and a seed. What it measured
is one line of runs.jsonl, in the tree. A run whose line is there is not played again, so you can
stop the script at any time and start it again.

    python benchmarks/evidence/run.py main                       # every run of a study
    python benchmarks/evidence/run.py main --arms recompute r3 --seeds 100 101
    python benchmarks/evidence/tables.py main                    # what came out
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.config import TrainingError, UsageError, load
from onepolicy.run.log import read_metrics

HERE = Path(__file__).parent
RECIPE, RESULTS = HERE / "study.toml", HERE / "runs.jsonl"
PLAN = tomllib.loads((HERE / "plan.toml").read_text())
BLOCKS = 10  # a run's curves are kept as means of so many equal blocks of steps
SPIKE = 5.0  # gradient norm above which a step counts as a spike
CURVES = {
    "reward": "train/reward",
    "k3": "mismatch/k3",
    "routers": "routing/routers",
    "entropy": "train/entropy",
    "grad_norm": "train/grad_norm",
    "halved": "train/halved_gradient",
    "rejected": "correction/rejected",  # not in the lines of the first runs
    "unreplayed": "counterfactual/mismatch/k3",  # the same batch scored without replay
}
DEFAULT_POLICY = "one-of-8"  # of study.toml
Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    study: str
    arm: str
    seed: int
    folder: Path

    @property
    def settings(self) -> list[str]:
        """Return the settings beside study.toml, the later ones last."""
        study, noise = PLAN["study"][self.study], f"rollout.pressure.seed={1000 + self.seed}"
        arm = PLAN["arms"][self.arm]
        pressed = [*study.get("pressure", ()), noise]
        if "rollout.pressure=off" in arm or not study.get("pressure"):
            pressed = []
        unguarded = ["replay.min_agreement=0"] if "replay.mode=r3" in arm else []
        return [*study.get("settings", ()), *pressed, *arm, *unguarded, f"seed={self.seed}"]


def main() -> None:
    options = arguments()
    make_policies(options.studies)
    done = {(run["study"], run["arm"], run["seed"]) for run in finished_runs(options.results)}
    jobs = [job for job in planned(options) if (job.study, job.arm, job.seed) not in done]
    print(f"{len(jobs)} runs to play, {len(done)} lines in {options.results}", flush=True)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, maxtasksperchild=8) as pool:
        for count, line in enumerate(pool.imap_unordered(play, jobs), 1):
            with options.results.open("a") as results:
                results.write(json.dumps(line) + "\n")
            print(f"{count}/{len(jobs)} {describe(line)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=list(PLAN["study"]), metavar="STUDY")
    parser.add_argument("--arms", nargs="+", choices=list(PLAN["arms"]), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="run folders")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"(default: {RESULTS.name})")
    options = parser.parse_args()
    if options.results.resolve() == RESULTS.resolve():
        for name in options.studies:
            refuse_pilots(parser, name, options.seeds, PLAN["study"][name]["seeds"])
    return options


def refuse_pilots(
    parser: argparse.ArgumentParser, study: str, seeds: Sequence[int] | None, planned: Sequence[int]
) -> None:
    """End with an error if a seed is none of the study's. planned: its first and last seed."""
    for seed in seeds or ():
        if not planned[0] <= seed <= planned[1]:
            parser.error(f"{study} has no seed {seed}; give a pilot --results FILE of its own")


def planned(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the runs that are asked for, seed by seed, so that finished runs are paired.

    A study's first arms are played with every seed before its other arms.
    """
    for name in options.studies:
        study = PLAN["study"][name]
        lowest, highest = study["seeds"]
        for arms in (study.get("first", []), study["arms"]):
            for seed in options.seeds or range(lowest, highest + 1):
                for arm in arms:
                    if not options.arms or arm in options.arms:
                        yield Job(name, arm, seed, options.out / name / f"{arm}-{seed}")


def make_policies(studies: Sequence[str]) -> None:
    """Make the policies that these studies need, if they are not there."""
    for command in policy_commands(studies):
        if not Path(command[command.index("--out") + 1]).exists():
            subprocess.run([sys.executable, "-m", "onepolicy", *command], check=True)


def policy_commands(studies: Sequence[str]) -> list[list[str]]:
    """Return the arguments of the `onepolicy make-policy` commands that these studies need."""
    settings = [each for name in studies for each in PLAN["study"][name].get("settings", ())]
    needed = {DEFAULT_POLICY} | {
        each.rpartition("/")[2] for each in settings if each.startswith("model.path=")
    }
    return [shlex.split(command) for name, command in PLAN["policies"].items() if name in needed]


def finished_runs(results: Path) -> list[Json]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def play(job: Job) -> Json:
    """Train one run in this process, on one thread, and return its line of runs.jsonl."""
    from onepolicy.interfaces import Progress
    from onepolicy.run.train import start_run

    shutil.rmtree(job.folder, ignore_errors=True)  # a run that was stopped
    started = time.monotonic()
    line: Json = {"study": job.study, "arm": job.arm, "seed": job.seed, "settings": job.settings}
    line["commit"] = commit()
    try:
        with intervention(job.arm):
            start_run(load(RECIPE, [f"out={job.folder}", *job.settings]), Progress())
        line["error"] = None
    except UsageError:
        raise
    except TrainingError as error:
        line["error"] = str(error)
    line["seconds"] = round(time.monotonic() - started)
    line |= measured(read_metrics(job.folder))
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    return line


def intervention(arm: str) -> AbstractContextManager[None]:
    """Return the context that a run of this arm trains in: most are their settings alone."""
    from drop_supports import dropped_supports
    from hold_entropy import held_entropy

    if arm in PLAN["drop_supports"]["arms"]:
        return dropped_supports()
    target = PLAN["hold_entropy"].get(arm)
    if target is None:
        return nullcontext()
    return held_entropy(target)


def commit() -> str:
    """Return the commit of the code that runs."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measured(rows: list[Json]) -> Json:
    """Return a run's evaluations, and its curves as means of equal blocks of steps."""
    steps = [row for row in rows if "train/reward" in row]
    evaluated = [row for row in rows if "eval/avg@4" in row]
    norms = [row["train/grad_norm"] for row in steps if row.get("train/grad_norm") is not None]
    size = max(1, len(steps) // BLOCKS)
    blocks = [steps[at : at + size] for at in range(0, size * BLOCKS, size)]
    return {
        "steps": len(steps),
        "sampled": [row["eval/avg@4"] for row in evaluated],
        "largest_norm": rounded(max(norms, default=None)),
        "spikes": sum(norm > SPIKE for norm in norms),
        "curves": {
            name: [block_mean(block, metric) for block in blocks] for name, metric in CURVES.items()
        },
    }


def block_mean(block: list[Json], metric: str) -> float | None:
    values = [row[metric] for row in block if row.get(metric) is not None]
    if not values:
        return None
    return rounded(sum(values) / len(values))


def rounded(value: float | None) -> float | None:
    if value is None:
        return None
    return float(f"{value:.4g}")


def describe(line: Json) -> str:
    k3 = line["curves"]["k3"]
    ends = " -> ".join(f"{value:.3f}" for value in line["sampled"])
    text = (
        f"{line['study']} {line['arm']} seed {line['seed']}: held-out {ends}, k3 {k3[0]} -> "
        f"{k3[-1]}, largest norm {line['largest_norm']}, {line['spikes']} spikes, "
        f"{line['seconds']} s"
    )
    if line["error"] is not None:
        text += f", {line['error']}"
    return text


if __name__ == "__main__":
    main()
