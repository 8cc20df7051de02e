"""The tests and benchmarks for one GPU, in three commands of at most nine minutes each.

    python benchmarks/gpu/run.py 1 --out OUT        # the tests marked gpu
    python benchmarks/gpu/run.py 2 --out OUT        # engine, step
    python benchmarks/gpu/run.py 3 --out OUT        # moe, head, attention, sync
    python benchmarks/gpu/run.py head sync --tiny   # the same code at toy shapes on a CPU

docs/gpu.md says what each shows. A commit can be given with --commit where there is no git.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in ("tests", "benchmarks", "src"):
    sys.path.insert(0, str(ROOT / folder))

PARTS = {"1": ["tests"], "2": ["engine", "step"], "3": ["moe", "head", "attention", "sync"]}
LIMITS = {
    "tests": 460,
    "engine": 330,
    "step": 190,
    "moe": 120,
    "head": 110,
    "attention": 130,
    "sync": 90,
}
"""Seconds after which a benchmark begins no new case."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=[*PARTS, *LIMITS], metavar="PART")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on any device")
    parser.add_argument("--device", default="", help="default: cuda, and cpu for --tiny")
    parser.add_argument("--commit", default="", help="of sources that are no git repository")
    return parser.parse_args()


def main() -> int:
    """Run the parts. Return 1 if a test failed or a package is missing."""
    args = arguments()
    from gpu.ready import problems

    found = problems()
    if found:
        print("\n".join(found))
        return 1
    status = 0
    for name in [name for what in args.what for name in PARTS.get(what, [what])]:
        start = time.monotonic()
        print(f"--- {name}", flush=True)
        status = max(status, run(name, args))
        print(f"--- {name}: {time.monotonic() - start:.0f} s", flush=True)
    return status


def run(name: str, args: argparse.Namespace) -> int:
    """Run one benchmark, or the tests. Return its exit status."""
    import torch
    from gpu.harness import Bench

    device = torch.device(args.device or ("cpu" if args.tiny else "cuda"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{name}: no CUDA device; --tiny runs the same code on a CPU")
        return 0
    bench = Bench(
        name, device, args.out.resolve(), args.tiny, LIMITS[name], given_commit=args.commit
    )
    return importlib.import_module(f"gpu.{name}").main(bench) or 0


if __name__ == "__main__":
    sys.exit(main())
