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
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evidence import trials
from json_lines import appending

from onepolicy.config import load

HERE = Path(__file__).resolve().parent
ROOT, POLICIES = HERE.parents[1], HERE / "policies"
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
NAMES = ("study", "arm", "seed")
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

    @property
    def digest(self) -> str:
        """Return the digest of its study and arm, of the recipe and of the policy."""
        study, path = PLAN["study"][self.study], f"model.path={POLICIES / DEFAULT_POLICY}"
        changed = PLAN["hold_entropy"].get(self.arm), self.arm in PLAN["drop_supports"]["arms"]
        for setting in study.get("settings", ()):
            if setting.startswith("model.path="):
                path = setting
        plan = [study, PLAN["arms"][self.arm], changed]
        return trials.digest_of(plan, RECIPE, ROOT / path.partition("=")[2])


def main() -> None:
    options = arguments()
    make_policies(options.studies)
    with appending(options.results) as append:
        lines = finished_runs(options.results)
        every = {(job.study, job.arm, job.seed): job for job in planned(options)}
        for line in lines:
            job = every.pop(tuple(line[name] for name in NAMES), None)
            if job is not None and "digest" in line:  # the first runs have none
                trials.refuse_other(options.results, line, job.digest, NAMES)
        jobs = list(every.values())
        print(f"{len(jobs)} runs to play, {len(lines)} lines in {options.results}", flush=True)
        for count, line in enumerate(trials.played(play, jobs, options.workers), 1):
            append(line)
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
    parser.add_argument("--again", action="store_true", help=trials.AGAIN)
    options = parser.parse_args()
    registered = options.results.resolve() == RESULTS.resolve()
    for name in options.studies:
        pilots = name.startswith("pilot") or options.again
        if registered or not pilots:
            seeds = PLAN["study"][name]["seeds"]
            trials.refuse_pilots(parser, name, options.seeds, seeds, registered=registered)
    return options


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
    return trials.finished(results, NAMES)


def play(job: Job) -> Json:
    """Train one run in this process, on one thread, and return its line of runs.jsonl."""
    from onepolicy.interfaces import Progress
    from onepolicy.run.train import start_run

    line: Json = {"study": job.study, "arm": job.arm, "seed": job.seed, "settings": job.settings}
    line |= {"commit": trials.commit(), "digest": job.digest}

    def train() -> None:
        with intervention(job.arm):
            start_run(load(RECIPE, [f"out={job.folder}", *job.settings]), Progress())

    line |= measured(trials.trained(line, job.folder, train))
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


def measured(rows: list[Json]) -> Json:
    """Return a run's evaluations, and its curves as means of equal blocks of steps."""
    steps = trials.steps_of(rows)
    evaluated = [row for row in rows if "eval/avg@4" in row]
    norms = [row["train/grad_norm"] for row in steps if row.get("train/grad_norm") is not None]
    blocks = trials.blocks_of(steps, BLOCKS)
    return {
        "steps": len(steps),
        "sampled": [row["eval/avg@4"] for row in evaluated],
        "largest_norm": rounded(max(norms, default=None)),
        "spikes": sum(norm > SPIKE for norm in norms),
        "curves": {
            name: [block_mean(block, metric) for block in blocks] for name, metric in CURVES.items()
        },
    }


def block_mean(block: Sequence[Json], metric: str) -> float | None:
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
