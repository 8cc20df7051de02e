"""Memory, bytes per sync and time of a step with adapters, beside full training.

Every arm is a short run of recipes/quickstart.toml in a process of its own, one after the other.

    python benchmarks/lora_cost.py                       # the policy of the quickstart
    python benchmarks/lora_cost.py --model benchmarks/evidence/policies/one-of-8 --steps 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from onepolicy.run.log import read_metrics

ROOT = Path(__file__).resolve().parents[1]
LORA = ("train.lora.rank=16", "optim.lr=1e-3")
ARMS = {
    "all weights": (),
    "rank 16, merged": LORA,
    "rank 16, native": (*LORA, "train.lora.sync=native"),
    "rank 4, native": ("train.lora.rank=4", "optim.lr=1e-3", "train.lora.sync=native"),
    "rank 16, attention, native": (
        *LORA,
        "train.lora.sync=native",
        'train.lora.targets=["attention"]',
    ),
}
HEADER = (
    "what is trained",
    "optimiser state [MB]",
    "a sync [MB]",
    "peak [MB]",
    "step [s]",
    "sync [s]",
)


def main() -> None:
    options = arguments()
    print("| " + " | ".join(HEADER) + " |\n|---" + "|---" * 5 + "|")
    for name, settings in ARMS.items():
        with tempfile.TemporaryDirectory() as folder:
            cells = measure(Path(folder) / "run", (*options.settings, *settings), options)
        print("| " + " | ".join((name, *cells)) + " |", flush=True)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", help="more settings of every run")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def measure(run: Path, settings: tuple[str, ...], options: argparse.Namespace) -> tuple[str, ...]:
    """Train a few steps. Return the cells of the table."""
    command = [
        *(sys.executable, "-m", "onepolicy", "train", str(ROOT / "recipes" / "quickstart.toml")),
        *(f"out={run}", f"model.path={options.model}", f"steps={options.steps}"),
        *("eval.every=0", "log={counterfactual_every=0,report=false,tensorboard=false}"),
        *settings,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(errors.decode()[-2000:])
    rows = [row for row in read_metrics(run) if "train/reward" in row]
    state = next(run.glob("checkpoints/step_*/optimizer.safetensors")).stat().st_size
    times = (statistics.median(row[f"time/{part}"] for row in rows) for part in ("step", "sync"))
    return (
        f"{state / 1e6:.2f}",
        f"{rows[-1]['sync/gib'] * 2**30 / 1e6:.2f}",
        f"{usage.ru_maxrss * 1024 / 1e6:.0f}",
        *(f"{each:.1f}" for each in times),
    )


if __name__ == "__main__":
    main()
