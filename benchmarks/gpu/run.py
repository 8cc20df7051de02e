"""The tests and benchmarks for one GPU, as one queue: what users most need to know comes first.

    python benchmarks/gpu/run.py --seconds 520 --out OUT      # as much of the queue as fits
    python benchmarks/gpu/run.py --resume OUT --out NEW       # what OUT has not, or not well
    python benchmarks/gpu/run.py moe head --out OUT           # these cases, in this order
    python benchmarks/gpu/run.py --tiny                       # the same code at toy shapes on a CPU
    python benchmarks/gpu/run.py --list

Every result is a line of OUT/results.jsonl when it is known; what programs print beside it is in
OUT/log.txt. cases.py has the cases in their order.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT / folder) for folder in ("tests", "benchmarks", "src")]
NEEDED = ("torch", "transformers", "pydantic", "tomlkit", "rich", "safetensors", "numpy", "httpx2")
NEEDED += ("pytest", "hypothesis")
JOBS = 4
"""Tests side by side on a GPU. They are bound by Python."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", help="default: all, in their order")
    parser.add_argument("--seconds", type=float, default=520, help="for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")))
    parser.add_argument("--resume", type=Path, help="results of an earlier lease: go on there")
    parser.add_argument("--tiny", action="store_true", help="toy shapes, on any device")
    parser.add_argument("--device", default="", help="default: cuda, and cpu for --tiny")
    parser.add_argument("--jobs", type=int, default=0, help=f"tests side by side: {JOBS}, 2 tiny")
    parser.add_argument("--commit", default="", help="of sources that are no git repository")
    parser.add_argument("--list", action="store_true", help="print the queue and end")
    return parser.parse_args()


def main() -> int:
    """Run the queue. Return 1 unless every case ended well."""
    begun, args = time.monotonic(), arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running case ends too
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // JOBS)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        print(
            f"missing here: {', '.join(lacking)}; `make gpu-pack`, where there is a network, makes"
        )
        print("a folder with what an image with torch may lack")
        return 1
    import torch
    from gpu.cases import CASES, preload
    from gpu.harness import Bench, clocks, commit, machine, output_of
    from gpu.lease import Results, run_queue

    named = {case.name: case for case in CASES}
    unknown = [name for name in args.case if name not in named]
    if unknown:
        print(f"no case {', '.join(unknown)}; there are {', '.join(named)}")
        return 2
    chosen = [named[name] for name in args.case or named]
    if args.list:
        for case in chosen:
            print(f"{case.name:<24} {case.seconds:4.0f} s")
        return 0
    device = torch.device(args.device or ("cpu" if args.tiny else "cuda"))
    if device.type == "cuda" and not output_of("nvidia-smi", "-L"):
        print("no CUDA device here; --tiny runs the same code at toy shapes on a CPU")
        return 1
    results = Results(args.out.resolve())
    if args.resume is not None:
        results.take_over(args.resume)
        done = results.done(tiny=args.tiny)
        print(f"{len(done)} cases ended well before: {', '.join(sorted(done))}")
        chosen = [case for case in chosen if case.name not in done]
    preload()
    if forked_processes_have_no_gpu():
        print("a module that cases.py imports asks for GPUs, after which no fork can use one")
        return 1
    results.add(
        lease=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        commit=commit(args.commit),
        tiny=args.tiny,
        command=sys.argv[1:],
        machine=machine(device),
        imports_seconds=round(time.monotonic() - begun, 1),
    )
    ended = run_queue(
        chosen,
        results,
        lambda case, limit: Bench(case.name, device, results, tiny=args.tiny, limit=limit),
        seconds=args.seconds - (time.monotonic() - begun),
        jobs=args.jobs or (2 if args.tiny else JOBS),
        clocks=clocks if device.type == "cuda" else lambda: "",
    )
    seconds = {row["case"]: row["seconds"] for row in results.rows() if "ended" in row}
    print(f"\n{'case':<24} {'s':>5}  ended")
    for name, how in ended.items():
        print(f"{name:<24} {seconds.get(name, 0):5.0f}  {how}")
    print(f"{time.monotonic() - begun:.0f} s in all; results: {args.out / results.path.name}")
    return int(any(how != "done" for how in ended.values()))


def forked_processes_have_no_gpu() -> bool:
    """Return whether torch refuses CUDA in a process that is forked from this one."""
    import torch

    pid = os.fork()
    if not pid:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return bool(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
