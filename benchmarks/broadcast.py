"""Seconds of a weight broadcast over gloo per GB, by the size of its buckets.

    python benchmarks/broadcast.py                 # 1 receiver
    python benchmarks/broadcast.py --receivers 2 --mib 64 1024

The trainer's side sends 128 bfloat16 tensors of 6 MiB (the experts of Qwen3-30B-A3B) to processes
on this machine; both sides sum every tensor. Nothing is gathered and no engine loads. The least of
the rounds, because other programs only add to it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch

from onepolicy.sync.broadcast import Receiver, Sender

COUNT, SHAPE = 128, (768, 4096)


def receive(invitation: str, rank: int) -> None:
    torch.set_num_threads(1)
    with Receiver(invitation, rank, version=1) as weights:
        for _ in weights:
            pass


def measure(tensors: dict[str, torch.Tensor], receivers: int, mib: int) -> float:
    """Return the seconds from the first tensor's bytes to the last receiver's answer."""
    with Sender(receivers=receivers, bucket_bytes=mib * 2**20) as sender:
        spawn = multiprocessing.get_context("spawn")
        others = [
            spawn.Process(target=receive, args=(sender.invitation, rank))
            for rank in range(1, 1 + receivers)
        ]
        for other in others:
            other.start()
        begun = []

        def stream():
            begun.append(time.perf_counter())  # all have joined
            yield from tensors.items()

        sender.send(stream(), 1)
        seconds = time.perf_counter() - begun[0]
        for other in others:
            other.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {f"expert.{i}": torch.randn(SHAPE).bfloat16() for i in range(COUNT)}
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    for mib in args.mib:
        seconds = min(measure(tensors, args.receivers, mib) for _ in range(args.rounds))
        print(
            f"{args.receivers} receivers, buckets of {mib} MiB: {seconds / gigabytes:.2f} s per GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
