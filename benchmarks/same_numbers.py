"""Every number of short runs of every kind, so that a redesign can show that it changed none.

    git worktree add ../before COMMIT
    python benchmarks/same_numbers.py --source ../before --out runs/before.json
    python benchmarks/same_numbers.py --out runs/after.json
    python benchmarks/same_numbers.py --compare runs/before.json runs/after.json

Each job runs the command line of a source tree and keeps: every metric of every step but times and
memory, the samples' texts, a SHA-256 of every stored tensor, the numbers of measure.json, and the
report on each dump of conformance/. Numbers are kept as text, so equal means equal to the bit.
Takes ten minutes on one core. Exit status of --compare: 0 if nothing differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
CHAIN = ROOT / "benchmarks/evidence/policies/one-of-8"
VARYING = ("time/", "memory/", "seconds", "throughput", "_per_s", "elapsed", "bandwidth", "started")
SHOWN = 20  # differences that --compare prints of a job

SHORT = [
    "steps=3",
    f"model.path={CHAIN}",
    "task.ops=4",
    "rollout.prompts_per_step=6",
    "rollout.group_size=4",
    "eval.every=2",
    "eval.problems=16",
]
AGENT = ["steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.every=0"]
TOKENS = [
    "max_len=256",
    "mistakes=0.5",
    "mistakes_from=0.6",
    "task.kind=react",
    "task.max_turns=3",
    'task.instructions=""',
    'task.tools=[{kind="calculator"}]',
    "task.problems.kind=gym",
    "task.problems.name=products",
    "task.problems.params.min_digits=2",
    "task.problems.params.max_digits=2",
]


def jobs(work: Path) -> dict[str, list[str]]:
    """Return the arguments of every job but its output folder.

    A job comes after those whose folder it reads.
    """
    quick, agent = "recipes/quickstart.toml", f"model.path={output(work, 'policy')}"
    own = "train.reuse_scoring_forward=false"
    reinforce = ["objective.preset=reinforce++-baseline", "objective.num_minibatches=2"]
    train = {
        "quickstart": [quick, *SHORT],
        "minibatches": [quick, *SHORT, own, "objective.num_minibatches=2", "correction.preset=tis"],
        "current policy": [quick, *SHORT, own, "correction.preset=icepop", "replay.mode=off"],
        "on-policy": ["recipes/on_policy.toml", *SHORT],
        "critic": [quick, *SHORT, own, "objective.preset=ppo"],
        "reference": [quick, *SHORT, own, "objective.kl.coef=0.01", "correction.preset=seq-mis"],
        "lora": [quick, *SHORT, own, "train.lora.rank=4"],
        "int8": [quick, *SHORT, own, 'rollout.quant={format="int8"}'],
        "two ranks": [quick, *SHORT, own, "train.ranks=2"],
        "agent": ["recipes/agent_products.toml", *AGENT, agent],
        "reinforce++": ["recipes/agent_products.toml", *AGENT, agent, *reinforce],
    }
    found = {"policy": ["make-policy", "steps=30", "layers=2", "tokens_per_step=1024", *TOKENS]}
    found |= {name: ["train", *arguments] for name, arguments in train.items()}
    found["measure"] = ["measure", "--tiny"]
    for dump in sorted((ROOT / "conformance").glob("*.parquet")):
        found[f"audit {dump.stem}"] = ["audit", str(dump.relative_to(ROOT))]
    return found


def output(work: Path, job: str) -> Path:
    return work / job.replace(" ", "_")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=ROOT, help="source tree that runs the jobs")
    parser.add_argument("--out", type=Path, help="JSON file of the numbers; jobs in it are kept")
    parser.add_argument("--jobs", nargs="+", help="run these only (default: all)")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*map(read, options.compare))
    if options.out is None:
        parser.error("--out FILE, or --compare BEFORE AFTER")
    run_all(options.source.resolve(), options.out, options.jobs)
    return 0


def run_all(source: Path, out: Path, chosen: list[str] | None) -> None:
    """Run the jobs that `out` does not hold yet, each job's numbers written as it ends."""
    found = read(out) if out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        todo = jobs(work)
        names = [name for name in todo if name not in found and (not chosen or name in chosen)]
        if "policy" not in names:  # the agents' jobs read its folder
            names.insert(0, "policy")
        for name in track(names, "jobs"):
            out_folder = output(work, name)
            status = run(source, todo[name], out_folder)
            found[name] = {"exit status": str(status)} | dict(collect(out_folder))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(found, indent=1))


def run(source: Path, arguments: list[str], out: Path) -> int:
    """Run a command of a source tree on one thread. Returns its exit status."""
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    written_to = ["--out", str(out)]
    if arguments[0] == "train":
        written_to = [f"out={out}"]
    command = [sys.executable, "-m", "onepolicy", *arguments, *written_to]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    expected = {"audit": (0, 1, 2), "measure": (0, 1)}  # a bug is named; the dump is refused
    if done.returncode not in expected.get(arguments[0], (0,)):
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr[-2000:]}")
    return done.returncode


def collect(out: Path) -> Iterator[tuple[str, str]]:
    """Yield every number of a job's folder with its place."""
    for path in sorted(out.rglob("*")):
        place = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            for name, tensor in sorted(load_file(path).items()):
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                yield f"{place} {name}", hashlib.sha256(data).hexdigest()
        elif path.name in ("metrics.jsonl", "samples.jsonl"):
            for number, line in enumerate(path.read_text().splitlines()):
                yield from leaves(json.loads(line), f"{place} row {number}", out.parent)
        elif path.name in ("measure.json", "audit.json"):
            yield from leaves(json.loads(path.read_text()), place, out.parent)


def leaves(value: Any, place: str, work: Path) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a JSON value, without times, memory and paths."""
    if any(word in place for word in VARYING):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{place} {key}", work)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{place} {number}", work)
    elif str(work) not in str(value):
        yield place, repr(value)


def read(path: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print what differs, job by job. Returns 1 if anything does."""
    differ = 0
    for job in before | after:
        old, new = before.get(job, {}), after.get(job, {})
        places = [place for place in old | new if old.get(place) != new.get(place)]
        differ += bool(places)
        print(f"{job}: {len(old)} numbers, {len(places)} differ")
        for place in places[:SHOWN]:
            print(f"    {place}: {old.get(place, 'none')} -> {new.get(place, 'none')}")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
