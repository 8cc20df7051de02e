"""A check that a change of the code's shape changed no number: the same recipes before and after,
compared value by value.

    python benchmarks/same_numbers.py run OUT       # OUT/NAME/... of each run below
    python benchmarks/same_numbers.py compare A B   # rows that differ; exit 1 if any does

`run` uses the checkout's own source. Only times are left out. Finished runs are kept, so an
interrupted `run` continues. Its policies are made once, beside OUT, and shared by both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL = (
    "steps=3 rollout.prompts_per_step=4 rollout.group_size=4 rollout.engine.max_num_seqs=16 "
    "objective.entropy_coef=0.01 "
    "eval.every=0 log.counterfactual_every=2 log.report=false log.tensorboard=false"
)
QUICK = "train recipes/quickstart.toml model.path={tiny} "
RUNS = {  # the five that are asked for, then one for each option of the learner
    "quickstart": QUICK + "steps=8 eval.every=4",
    "on_policy": "train recipes/on_policy.toml model.path={tiny} steps=4",
    "agent": "train recipes/agent_products.toml model.path={agent} steps=4 eval.problems=16",
    "two_ranks": QUICK + "steps=3 train.ranks=2 train.reuse_scoring_forward=false eval.every=0",
    "measure": "measure --tiny --out {out} rollout.engine.dtype=bfloat16",
    "off": QUICK + SMALL + " replay.mode=off correction.preset=tis",
    "r2": QUICK
    + SMALL
    + " replay.mode=r2 objective.num_minibatches=2 train.reuse_scoring_forward=false",
    "soft": QUICK + SMALL + " replay.mode=soft replay.ratio=0.9 train.reuse_scoring_forward=false",
    "weights": QUICK + SMALL + " replay.mode=weights train.reuse_scoring_forward=false",
    "reprefill": QUICK + SMALL + " replay.source=reprefill",
    "critic": QUICK + SMALL + " objective.preset=ppo",
    "reference": QUICK + SMALL + " objective.kl.coef=0.01",
    "bypass": QUICK
    + SMALL
    + " correction.preset=ppo-is objective.num_minibatches=2 train.reuse_scoring_forward=false",
    "centering": QUICK
    + SMALL
    + " correction.preset=score-centering objective.surrogate=pg train.reuse_scoring_forward=false",
    "live": QUICK
    + SMALL
    + " correction.preset=opsm objective.num_minibatches=2 train.reuse_scoring_forward=false",
    "gspo": QUICK
    + SMALL
    + " objective.preset=gspo objective.num_minibatches=2 train.reuse_scoring_forward=false",
    "dapo": QUICK + SMALL + " objective.preset=dapo",
    "int8": QUICK + SMALL + " rollout.quant.format=int8 eval.every=2 eval.problems=8",
    "ahead": QUICK + SMALL + " rollout.max_staleness=0",
    "checkpointing": QUICK
    + SMALL
    + " train.activation_checkpointing=true train.reuse_scoring_forward=false",
}
POLICIES = {
    "tiny": "",
    "agent": "layers=4 max_len=256 tokens_per_step=2048 steps=120 mistakes=0.5 mistakes_from=0.6 "
    "task.kind=react "
    'task.max_turns=3 task.instructions="" task.tools=[{kind="calculator"}] task.problems.kind=gym '
    "task.problems.name=products task.problems.params.min_digits=2 "
    "task.problems.params.max_digits=2",
}


def onepolicy(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "onepolicy", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def run(out: Path, names: list[str]) -> None:
    policies = {name: out.parent / f"policy-{name}" for name in POLICIES}
    for name, settings in POLICIES.items():
        if not policies[name].exists():
            done = onepolicy(["make-policy", "--out", str(policies[name]), *settings.split()])
            assert done.returncode == 0, done.stdout + done.stderr
    for name in names or RUNS:
        folder = out / name
        if (folder / "done").exists():
            continue
        command = RUNS[name].format(out=folder, **policies).split()
        if command[0] == "train":
            command.append(f"out={folder}")
        done = onepolicy(command)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ("done" if done.returncode == 0 else "failed")).write_text(
            done.stdout + done.stderr
        )
        print(f"{name}: exit {done.returncode}", flush=True)


def numbers(folder: Path) -> dict[str, Any]:
    """Return every value that a run wrote, by its place; without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.json*")):
        if path.name in {"metrics.jsonl", "measure.json", "samples.jsonl", "bitwise.json"}:
            for number, line in enumerate(
                path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            ):
                _walk(json.loads(line), f"{path.name}:{number}", found)
    return found


TIMES = (
    "time",
    "seconds",
    "per_second",
    "written",
    "path",
    "out",
    "onepolicy",
    "fingerprint",
    "memory",
    "took",
)
TIMES += ("started", "async")


def _walk(value: Any, place: str, found: dict[str, Any]) -> None:
    if any(word in place.rsplit("/", 1)[-1].lower() or f"{word}/" in place for word in TIMES):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            _walk(inner, f"{place} {key}", found)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _walk(inner, f"{place} {index}", found)
    else:
        found[place] = value


def compare(first: Path, second: Path) -> int:
    wrong = 0
    for name in RUNS:
        a, b = numbers(first / name), numbers(second / name)
        differ = [
            key
            for key in sorted(a.keys() | b.keys())
            if a.get(key, "missing") != b.get(key, "missing")
        ]
        differ = [
            key for key in differ if not (a.get(key) != a.get(key) and b.get(key) != b.get(key))
        ]  # NaN both
        print(f"{name}: {len(a)} values, {len(differ)} differ" + ("" if a else "  NOT RUN"))
        for key in differ[:5]:
            print(f"    {key}: {a.get(key, 'missing')} -> {b.get(key, 'missing')}")
        wrong += bool(differ) or not a
    return int(wrong > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=["run", "compare"])
    parser.add_argument("paths", nargs="+", help="run: OUT [NAME ...]; compare: A B")
    arguments = parser.parse_args()
    first, *rest = arguments.paths
    if arguments.do == "compare":
        return compare(Path(first), Path(rest[0]))
    run(Path(first).resolve(), rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
