"""Damaged files, folders, recipes and replies, as many as you want: the tests' fuzzers with other
inputs.

    python benchmarks/fuzz.py --out runs/fuzz --seed 1 --inputs 100000
    python benchmarks/fuzz.py --out runs/fuzz --seed 1 --inputs 100000 --only dump model
    python benchmarks/fuzz.py --out runs/fuzz

Each target gets `--inputs` further inputs, in ten rounds. It goes on where an earlier
call with the same `--out` stopped, and after failures. Without `--inputs` it prints the table of
what was tried. Input i of a target follows from seed, target and i alone. Exit status 1 if any
input gave another exception than the declared one, a result that the target's check does not
accept, or took more than 5 s of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from support.fuzz import CAMPAIGN

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 10
TARGETS = {
    "reply": "tests/integration/rollout/remote/test_fuzz_replies.py",
    "dump": "tests/integration/record/test_fuzz_dumps.py",
    "shape": "tests/integration/record/test_fuzz_shapes.py",
    "recipe": "tests/unit/config/test_fuzz_recipes.py",
    "run": "tests/integration/run/test_run_folder_damage.py",
    "history": "tests/integration/run/test_fuzz_history.py",
    "stranger": "tests/integration/run/test_fuzz_stranger_runs.py",
    "model": "tests/integration/models/test_fuzz_models.py",
}


def run_round(kind: str, out: Path, seed: int, inputs: int) -> None:
    """Try so many inputs of every target of a kind."""
    given = json.dumps({"out": str(out), "seed": seed, "inputs": inputs})
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:logging",
        "-n",
        "0",
    ]
    words += ["-m", "not slow", "-k", "fast", "--timeout", "0", TARGETS[kind]]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | {CAMPAIGN: given}, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:])
        raise SystemExit(f"{TARGETS[kind]} did not run")


def print_table(out: Path) -> int:
    """Print what was tried; return the number of failures."""
    table = Table("target", "inputs", "accepted", "failed", "slowest [s of CPU]")
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    for row in found:
        cells = (row[name] for name in ("target", "inputs", "accepted", "failed", "slowest_s"))
        table.add_row(*map(str, cells))
    table.add_section()
    sums = (sum(row[name] for row in found) for name in ("inputs", "accepted", "failed"))
    slowest = max((row["slowest_s"] for row in found), default=0)
    table.add_row("all", *map(str, sums), str(slowest))
    Console().print(table)
    for row in found:
        for failure in row["failures"]:
            print(failure["input"], failure["error"], sep="\n")
    return sum(row["failed"] for row in found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=0, help="for each target")
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for number in range(ROUNDS):
        until = given.inputs * (number + 1) // ROUNDS
        inputs = until - given.inputs * number // ROUNDS
        for kind in given.only if inputs else ():
            run_round(kind, given.out.resolve(), given.seed, inputs)
    return min(1, print_table(given.out))


if __name__ == "__main__":
    sys.exit(main())
