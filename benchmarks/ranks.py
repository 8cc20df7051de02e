"""Step time of a run on two ranks, and seconds until a killed rank is noticed, of several checkouts
side by side.

    python benchmarks/ranks.py RECIPE                        # this checkout
    python benchmarks/ranks.py RECIPE --sources . ../before  # and another one, in turns

Each round trains `--steps` steps in every checkout, one after the other. Then it starts the same
run again, kills one rank by SIGKILL after its second step, and waits for the command's end. Printed
are medians over the rounds: of the median step, and of the seconds from the kill to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL_S = 0.01
RANKS = 2


def start(source: Path, recipe: Path, out: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Start `onepolicy train` from the source code in this checkout."""
    command = [sys.executable, "-m", "onepolicy", "train", str(recipe.resolve()), f"out={out}"]
    common = [f"train.ranks={RANKS}", "eval.every=0", "checkpoint.every=100000"]
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, *common, *settings],
            env=os.environ | {"PYTHONPATH": str(source.resolve() / "src")},
            stdout=log,
            stderr=log,
        )


def step_times(out: Path) -> list[float]:
    """Return the seconds of every step in the log so far."""
    log = out / "metrics.jsonl"
    if not log.exists():
        return []
    lines = log.read_text().split("\n")[:-1]
    return [row["time/step"] for row in map(json.loads, lines) if "time/step" in row]


def step_seconds(source: Path, recipe: Path, out: Path, steps: int) -> float:
    """Train, and return the median seconds of a step. The first two are left out."""
    run = start(source, recipe, out, f"steps={steps}")
    if run.wait():
        raise SystemExit(out.with_suffix(".log").read_text())
    return statistics.median(step_times(out)[2:])


def last_rank(pid: int) -> int:
    """Return the process of the last rank below this process."""
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={RANKS - 1}".encode() in variables:
            return child
    raise SystemExit(f"process {pid} has no rank {RANKS - 1}")


def seconds_until_noticed(source: Path, recipe: Path, out: Path) -> float:
    """Kill the last rank of a run and return the seconds until the command ends."""
    run = start(source, recipe, out, "steps=100000")
    while len(step_times(out)) < 2:
        time.sleep(POLL_S)
    os.kill(last_rank(run.pid), signal.SIGKILL)
    killed = time.monotonic()
    run.wait()
    return time.monotonic() - killed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sources", type=Path, nargs="+", default=[Path(".")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    steps: dict[Path, list[float]] = {source: [] for source in options.sources}
    noticed: dict[Path, list[float]] = {source: [] for source in options.sources}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds):
            for number, source in enumerate(options.sources):
                out = Path(folder, f"{round_number}-{number}")
                found = step_seconds(source, options.recipe, out, options.steps)
                steps[source].append(found)
                out = Path(folder, f"{round_number}-{number}-killed")
                noticed[source].append(seconds_until_noticed(source, options.recipe, out))
                print(f"{source}: {found:.3f} s a step, {noticed[source][-1]:.1f} s", flush=True)
    for source in options.sources:
        print(
            f"{source}: median step {statistics.median(steps[source]):.3f} s, a killed rank ends "
            f"the command after {statistics.median(noticed[source]):.1f} s"
        )


if __name__ == "__main__":
    main()
