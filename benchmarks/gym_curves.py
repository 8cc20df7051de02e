"""Reward curves on reasoning-gym data sets: for every recipes/gym_*.toml, make its policy and train
a few seeds.

Policies and finished runs that are already there are kept, and an interrupted run is resumed, so
the script can be stopped and started again. Each policy is made with the command in the recipe's
first comment.

    python benchmarks/gym_curves.py                 # all of them, seeds 0 1 2
    python benchmarks/gym_curves.py recipes/gym_spell_backward.toml --seeds 0 --threads 1
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("recipe", "seed", "reward first 5", "reward last 5", "greedy", "avg@k", "s/step")


def main() -> None:
    options = arguments()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER), flush=True)
    for recipe in options.recipes or sorted((ROOT / "recipes").glob("gym_*.toml")):
        policy = make_policy(recipe, options.policies, options.threads)
        for seed in options.seeds:
            run = options.out / f"{recipe.stem}-seed{seed}"
            train(recipe, policy, run, seed, options.threads)
            print("| " + " | ".join((recipe.stem, str(seed), *figures(run))) + " |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*", type=Path, help="default: every recipes/gym_*.toml")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gym"), help="folder of the runs (default: runs/gym)"
    )
    parser.add_argument(
        "--policies",
        type=Path,
        help="folder of the policies (default: where the recipes' model.path points)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch (default: 1)")
    return parser.parse_args()


def policy_command(recipe: Path) -> list[str]:
    """Return the arguments of the `onepolicy make-policy` command in the recipe's leading
    comment."""
    comment = []
    for line in recipe.read_text().splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text = " ".join(comment).replace("\\ ", " ")
    words = shlex.split(text.partition("onepolicy make-policy")[2])
    if "--out" not in words:
        raise SystemExit(
            f"{recipe}: the leading comment gives no `onepolicy make-policy --out ...` command"
        )
    return ["make-policy", *words]


def make_policy(recipe: Path, folder: Path | None, threads: int) -> Path:
    path = Path(tomllib.loads(recipe.read_text())["model"]["path"])
    path = folder / path.name if folder else path
    if not path.exists():
        command = policy_command(recipe)
        command[command.index("--out") + 1] = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        onepolicy([*command, f"threads={threads}"], path.with_suffix(".log"))
    return path


def train(
    recipe: Path, policy: Path, run: Path, seed: int, threads: int, overrides: Sequence[str] = ()
) -> None:
    if (run / "summary.json").exists():
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    log = run.with_suffix(".log")
    if any(run.glob("checkpoints/step_*")):
        onepolicy(["train", "--resume", str(run)], log)
        return
    shutil.rmtree(run, ignore_errors=True)  # stopped before its first checkpoint
    settings = (
        f"model.path={policy}",
        f"out={run}",
        f"seed={seed}",
        f"train.threads={threads}",
        *overrides,
    )
    onepolicy(["train", str(recipe), *settings], log)


def onepolicy(command: list[str], log: Path) -> None:
    with log.open("a") as file:
        process = [sys.executable, "-m", "onepolicy", *command]
        code = subprocess.run(
            process, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise SystemExit(f"onepolicy {shlex.join(command)} failed with status {code}; see {log}")


def figures(run: Path) -> tuple[str, ...]:
    """Return the mean reward of the first and last steps, evaluations before and after, and seconds
    per step."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/greedy" in row]
    sampled = next(key for key in evaluated[0] if key.startswith("eval/avg@"))
    changes = [
        f"{evaluated[0][key]:.2f} → {evaluated[-1][key]:.2f}" for key in ("eval/greedy", sampled)
    ]
    rewards = (f"{summary[key]:.3f}" for key in ("reward_first", "reward_last"))
    return *rewards, *changes, f"{summary['time']['step']:.1f}"


if __name__ == "__main__":
    main()
