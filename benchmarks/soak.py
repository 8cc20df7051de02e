"""A run of many steps whose processes are killed at random moments, compared with an undisturbed
run.

    python benchmarks/soak.py --steps 500 --kills 20 --out runs/soak      # driver and ranks
    python benchmarks/soak.py --server --steps 300 --kills 12 --out runs/soak-server
    python benchmarks/soak.py --show --out runs/soak --figures docs/figures --png

A small policy is made and trained twice, at once: undisturbed, and under `onepolicy train
--restarts` while SIGKILL strikes at seeded moments, start-up, save and resume included. The second
run must have every step once with whole batches, the first one's numbers and weights to the bit,
and a reward that rose.

With --server a vLLM server samples and is killed as well, alone or together with the driver. A
killed process is started again on its port. The bits of a log-probability then depend on the
requests that met in a batch, so there is no undisturbed run: every batch must have been sampled
from the learner's own weights (k3 in float32).

OUT/soak.json has the conditions that held, the losses, and the seconds until a new step; exit 1
unless everything held. --show draws a soak that has ended.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from soak_outcome import failed, figure, last_step, newest_checkpoint, outcome
from soak_server import Server

from onepolicy.report.png import write_figures

RECIPE = """
out = "set below"
steps = {steps}
model = {{ path = "{policy}" }}
task = {{ kind = "chain", ops = 2 }}
rollout.prompts_per_step = 4
rollout.group_size = 8
rollout.sampling = {{ max_tokens = 16 }}
rollout.engine = {engine}
optim = {{ lr = 1e-4, warmup_steps = 10 }}
train = {{ threads = 1, device = "cpu", ranks = {ranks} }}
eval = {{ every = 0 }}
log = {{ counterfactual_every = 0, tensorboard = false, report = false }}
checkpoint = {{ every = 10, keep = 2 }}
"""
EMBEDDED = '{ dtype = "float32", max_num_seqs = 32 }'
# knows the table, and is taught to err: what the reward rises by is those errors going away
POLICY = [
    "hidden_size=64",
    "layers=2",
    "experts=16",
    "top_k=4",
    "max_len=64",
    "steps=1200",
    "warmup_steps=20",
]
POLICY += ["lr=4e-3", "mistakes=0.3", "task.kind=chain", "task.ops=2"]
AGAIN, SOON_S = (
    0.3,
    15.0,
)  # share of kills that another follows so soon, unless there is a new step before it
LIMIT_S = 1800.0  # without a new step
COMMAND = [sys.executable, "-m", "onepolicy"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--kills", type=int, default=20, help="and some more while it resumes from one of these"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--server", action="store_true", help="sample from a vLLM server, and kill it too"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    parser.add_argument(
        "--policy", type=Path, help="made before; unset: OUT/policy, made if it is not there"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="a.b=c", help="settings of both runs"
    )
    parser.add_argument(
        "--show", action="store_true", help="run nothing: outcome and figure of what is in OUT"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="reward over steps with the kills marked"
    )
    parser.add_argument("--png", action="store_true", help="and as PNG")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if not args.show:
        soak(args)
    record = json.loads((args.out / "strikes.json").read_text())
    found = outcome(args.out, record["steps"], record["strikes"])
    settings = {name: value for name, value in record.items() if name != "strikes"}
    text = json.dumps(settings | found, indent=1)
    (args.out / "soak.json").write_text(text)
    print(text)
    if args.figures:
        for written in write_figures(
            args.figures, [figure(args.out, record["strikes"], found)], png=args.png
        ):
            print(written)
    return 1 if failed(found) else 0


def soak(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    policy, recipe = args.policy or args.out / "policy", args.out / "recipe.toml"
    if not policy.exists():
        subprocess.run([*COMMAND, "make-policy", "--out", str(policy), *POLICY], check=True)
    began = time.monotonic()
    with ExitStack() as running:
        server = (
            running.enter_context(Server(COMMAND, policy, args.out / "server.log"))
            if args.server
            else None
        )
        engine = server.setting if server else EMBEDDED
        recipe.write_text(
            RECIPE.format(steps=args.steps, policy=policy, ranks=args.ranks, engine=engine)
        )
        train = [*COMMAND, "train", str(recipe), *args.set]
        if server is None:
            in_peace = subprocess.Popen(
                [*train, f"out={args.out / 'whole'}"], stdout=subprocess.DEVNULL
            )
            running.callback(in_peace.kill)
        strikes = strike(train, args, server)
        assert server or in_peace.wait() == 0
        lives = {"server_starts": server.lives} if server else {}
    minutes = (time.monotonic() - began) / 60
    record = {"steps": args.steps, "ranks": args.ranks, "server": args.server, "minutes": minutes}
    (args.out / "strikes.json").write_text(
        json.dumps(record | lives | {"strikes": strikes}, indent=1)
    )


def strike(train: list[str], args: argparse.Namespace, server: Server | None) -> list[dict]:
    """Run and kill. Return for every kill: victim, step before it, steps that are computed again,
    seconds until the next new step (None where the run had no step left)."""
    generator, strikes, out = random.Random(args.seed), [], args.out / "killed"
    kinds = [
        "driver",
        *["rank"] * (args.ranks > 1),
        *["server", "driver and server"] * (server is not None),
    ]
    victims = [kinds[number % len(kinds)] for number in range(args.kills)]
    generator.shuffle(victims)
    with (args.out / "killed.log").open("wb") as log:
        run = subprocess.Popen(
            [*train, f"out={out}", "--restarts", str(2 * args.kills)], stdout=log, stderr=log
        )
        try:
            for number, whom in enumerate(victims):
                due = round(0.95 * args.steps * (number + generator.random()) / args.kills)
                new_step(due - 1, run, out)
                time.sleep(generator.uniform(0, 1.5))
                hits = [hit(run, whom, server, out)]
                step = hits[0]["step"]
                if generator.random() < AGAIN and not wait_beyond(
                    step, run, out, generator.uniform(0.5, SOON_S)
                ):
                    hits.append(hit(run, "driver", server, out) | {"whom": "driver, resuming"})
                    if hits[1]["step"] == step:
                        hits[1]["lost"] = 0  # none of them was computed again yet
                new = new_step(step, run, out)
                now = time.monotonic()
                for each in hits:
                    struck = each.pop("struck")
                    strikes.append(each | {"seconds": now - struck if new else None})
            assert run.wait() == 0, f"the run ended with {run.returncode}; see {log.name}"
        finally:
            stop(run)
    return strikes


def wait_beyond(step: int, run: subprocess.Popen, out: Path, limit_s: float) -> bool:
    """Return whether the log came to have a later step in time and before the run ended."""
    end = time.monotonic() + limit_s
    while run.poll() is None and last_step(out) <= step and time.monotonic() < end:
        time.sleep(0.02)
    return last_step(out) > step


def new_step(step: int, run: subprocess.Popen, out: Path) -> bool:
    found = wait_beyond(step, run, out, LIMIT_S)
    assert found or run.poll() is not None, f"no step after {step} within {LIMIT_S} s"
    return found


def hit(run: subprocess.Popen, whom: str, server: Server | None, out: Path) -> dict:
    """Kill, and wait until the driver has ended: its last step may come after its rank's death."""
    while (pid := victim(run.pid, whom)) is None and run.poll() is None:
        time.sleep(0.02)  # between two lives
    assert pid is not None, f"the run ended with {run.returncode} before its last kill"
    driver, struck = victim(run.pid, "driver"), time.monotonic()
    if server and "server" in whom:
        server.kill()
    if whom != "server":
        os.kill(pid, signal.SIGKILL)
        while Path(f"/proc/{driver}").exists():
            assert time.monotonic() < struck + LIMIT_S, f"the driver outlives its {whom}"
            time.sleep(0.02)
    step = last_step(out)
    lost = 0 if whom == "server" else step - newest_checkpoint(out)
    return {"whom": whom, "step": step, "lost": lost, "struck": struck}


def victim(supervisor: int, whom: str) -> int | None:
    """Return the process that runs the command or, for `rank`, one of the ranks that it started."""
    for driver in children_of(supervisor):
        if whom != "rank":
            return driver
        ranks = children_of(driver)
        return random.choice(ranks) if ranks else None
    return None


def children_of(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def stop(run: subprocess.Popen) -> None:
    """Stop the processes of a soak that failed: the supervisor passes SIGTERM on."""
    if run.poll() is None:
        run.terminate()
        run.wait()


if __name__ == "__main__":
    sys.exit(main())
