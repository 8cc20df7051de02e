"""A run of many steps whose processes are killed at random moments, beside the same run that nobody disturbs.

    python benchmarks/soak.py --steps 500 --kills 20 --out runs/soak

A small policy is made and trained twice with `train.ranks=2`, at once: in peace, and under `onepolicy train --restarts`
while SIGKILL strikes the driver or a rank at seeded moments, start-up, save and resume included. Prints, and writes to
OUT/soak.json, what was lost and how long it took to be back, and fails unless the second run has every step once, the
first run's numbers and weights to the bit, and a reward that rose.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

RECIPE = """
out = "set below"
steps = {steps}
model = {{ path = "{policy}" }}
task = {{ kind = "chain", ops = 3 }}
rollout = {{ prompts_per_step = 2, group_size = 4, sampling = {{ max_tokens = 24 }}, engine = {{ slots = 8 }} }}
optim = {{ lr = 3e-4 }}
train = {{ threads = 1, device = "cpu", ranks = {ranks} }}
eval = {{ every = 0 }}
log = {{ counterfactual_every = 0, tensorboard = false, report = false }}
checkpoint = {{ every = 10, keep = 2 }}
"""
POLICY = ["hidden_size=64", "layers=3", "experts=16", "top_k=4", "max_len=128", "steps=500", "tokens_per_step=1024"]
POLICY += ["warmup_steps=10", "lr=4e-3", "task.kind=chain", "task.ops=3"]
TAIL = 1 << 16  # bytes, more than a line
COMMAND = [sys.executable, "-m", "onepolicy.cli"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    policy, recipe = args.out / "policy", args.out / "recipe.toml"
    whole, killed = args.out / "whole", args.out / "killed"
    if not policy.exists():
        subprocess.run([*COMMAND, "make-policy", "--out", str(policy), *POLICY], check=True)
    recipe.write_text(RECIPE.format(steps=args.steps, policy=policy, ranks=args.ranks))
    began = time.monotonic()
    with subprocess.Popen([*COMMAND, "train", str(recipe), f"out={whole}"], stdout=subprocess.DEVNULL) as in_peace:
        strikes = strike(recipe, killed, args)
        assert in_peace.wait() == 0
    result = compare(whole, killed, args.steps) | recovery(strikes) | {"minutes": (time.monotonic() - began) / 60}
    (args.out / "soak.json").write_text(json.dumps(result | {"strikes": strikes}, indent=1))
    print(json.dumps(result, indent=1))
    return 0 if all(result[name] for name in ("every_step_once", "bit_equal", "reward_rose")) else 1


def strike(recipe: Path, out: Path, args: argparse.Namespace) -> list[dict]:
    """Run and kill. Of every kill: whom, after which step, how many steps were lost, seconds until the next new one."""
    generator, strikes = random.Random(args.seed), []
    command = [*COMMAND, "train", str(recipe), f"out={out}", "--restarts", str(args.kills + 5)]
    with (out.parent / "killed.log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log)
        for number in range(args.kills):
            due = round(args.steps * (number + generator.random()) / args.kills)
            while run.poll() is None and last_step(out) < due:
                time.sleep(0.05)
            time.sleep(generator.uniform(0, 1.5))
            whom = generator.choice(["driver", "rank"] if args.ranks > 1 else ["driver"])
            while (pid := victim(run.pid, whom)) is None and run.poll() is None:
                time.sleep(0.02)  # between two lives
            assert pid is not None, f"the run ended with {run.poll()}; see {log.name}"
            step = last_step(out)
            os.kill(pid, signal.SIGKILL)
            struck, lost = time.monotonic(), step - newest_checkpoint(out)
            while run.poll() is None and last_step(out) <= step:
                time.sleep(0.02)
            strikes.append({"whom": whom, "step": step, "lost": lost, "seconds": time.monotonic() - struck})
        assert run.wait() == 0, f"the run ended with {run.returncode}; see {log.name}"
    return strikes


def victim(supervisor: int, whom: str) -> int | None:
    for driver in children_of(supervisor):
        ranks = children_of(driver)
        return driver if whom == "driver" else next(iter(ranks), None)
    return None


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def lines(path: Path) -> list[dict]:
    """Complete lines of a file that is being written."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def last_step(out: Path) -> int:
    """Of the last complete line."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        complete = file.read().split(b"\n")[:-1]
    return json.loads(complete[-1])["step"] if complete else 0


def newest_checkpoint(out: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in out.glob("checkpoints/step_*")), default=0)


def compare(whole: Path, killed: Path, steps: int) -> dict:
    import torch
    from safetensors.torch import load_file

    first, second = (lines(run / "metrics.jsonl") for run in (whole, killed))
    timeless = [
        [{k: v for k, v in row.items() if not k.startswith("time/") and "per_second" not in k} for row in rows]
        for rows in (first, second)
    ]
    folders = [run / "checkpoints" / f"step_{steps:05d}" for run in (whole, killed)]
    tensors = [{path.name: load_file(path) for path in sorted(f.rglob("*.safetensors"))} for f in folders]
    equal = tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][file][name], tensors[1][file][name]) for file in tensors[0] for name in tensors[0][file]
    )
    rewards = [row["train/reward"] for row in second]
    tenth = max(1, steps // 10)
    before, after = statistics.mean(rewards[:tenth]), statistics.mean(rewards[-tenth:])
    return {
        "every_step_once": [row["step"] for row in second] == list(range(1, steps + 1)),
        "bit_equal": equal and timeless[0] == timeless[1],
        "samples_equal": (whole / "samples.jsonl").read_bytes() == (killed / "samples.jsonl").read_bytes(),
        "reward_rose": after > before,
        "reward_first_tenth": before,
        "reward_last_tenth": after,
    }


def recovery(strikes: list[dict]) -> dict:
    found = {"kills": len(strikes), "kills_of_ranks": sum(each["whom"] == "rank" for each in strikes)}
    if strikes:
        seconds = [each["seconds"] for each in strikes]
        found |= {"steps_recomputed": sum(each["lost"] for each in strikes)}
        found |= {"seconds_to_a_new_step": {"median": statistics.median(seconds), "largest": max(seconds)}}
    return found


if __name__ == "__main__":
    sys.exit(main())
