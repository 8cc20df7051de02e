"""Seconds of a weight sync to replicas of `cluster.kind = ray` on this machine.

    python benchmarks/replica_sync.py --rounds 6         # 1, 2 and 4 replicas of 196M parameters
    python benchmarks/replica_sync.py --models tiny --replicas 1 8

Median of the rounds after the first, and of the part in which the tensors are taken and stored.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Iterator

from onepolicy.interfaces import Progress
from onepolicy.rollout.spec import EngineSpec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from sync import CPU, MAX_LEN, saved, show
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, ModelConfig, resolve
from onepolicy.launch.ray.connect import open_ray_launcher


class Written:
    """The learner's tensors, and the seconds of taking and storing them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.weights = model.state_dict()
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        begun = time.perf_counter()
        yield from self.weights.items()
        self.seconds = time.perf_counter() - begun


def measured(
    folder: str, model: PreTrainedModel, count: int, rounds: int
) -> dict[str, list[float]]:
    """Return seconds by kind of work, sorted."""
    settings = {"out": "x", "steps": 1, "model": {"path": folder}, "task": {"kind": "chain"}}
    config = resolve(
        settings, ["cluster.kind=ray", f"cluster.replicas={count}", "train.device=cpu"]
    )
    own = HFEngineConfig(dtype="bfloat16")
    found: dict[str, list[float]] = {"stored": [], "whole": []}
    with open_ray_launcher(config, Progress()) as launcher:
        replicas = launcher.build_engine(EngineSpec(ModelConfig(path=folder), own, CPU, MAX_LEN))

        async def load() -> None:
            for version in range(1, rounds + 2):
                written, begun = Written(model), time.perf_counter()
                await replicas.load_weights(written, version)
                found["whole"].append(time.perf_counter() - begun)
                found["stored"].append(written.seconds)

        asyncio.run(load())
    return {name: sorted(times[1:]) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("tiny", "big"), default=["big"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, model, size, folder in saved(args.models):
        for count in args.replicas:
            show(f"{name}, {count} replicas", measured(folder, model, count, args.rounds), size)


if __name__ == "__main__":
    main()
