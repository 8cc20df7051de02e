"""Where this process stands among the ranks of a run, as its environment says."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onepolicy.config import RunConfig, UsageError, resolve
from onepolicy.models.load import parse_device


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where this process stands among the ranks."""

    rank: int
    ranks: int
    local_rank: int
    local: bool  # all ranks are on this machine

    @classmethod
    def from_environment(cls) -> RankInfo | None:
        """As torchrun says, or who started this rank; None in a process that nobody started as a rank."""
        env = os.environ
        if not {"RANK", "WORLD_SIZE"} <= env.keys():
            return None
        ranks = int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_WORLD_SIZE", ranks))
        return cls(int(env["RANK"]), ranks, int(env.get("LOCAL_RANK", env["RANK"])), local == ranks)

    def device(self, name: str) -> torch.device:
        """Every rank takes its own GPU of its machine."""
        device = parse_device(name)
        if device.type == "cpu":
            return device
        if device.index is None and self.local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"train.ranks: rank {self.rank} is number {self.local_rank + 1} on its machine, which has "
                f"{torch.cuda.device_count()} CUDA devices; use as many ranks as GPUs"
            )
        device = torch.device("cuda", device.index if device.index is not None else self.local_rank)
        torch.cuda.set_device(device)
        return device

    def join(self, store: dist.Store, device: torch.device, limit: float) -> DeviceMesh:
        """The default process group and a mesh over it. Gloo for what lies in host memory."""
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=limit),
        )
        return init_device_mesh(device.type, (self.ranks,))


def apply_torchrun_ranks(
    config: RunConfig, ranks: int | None = None, *, resuming: bool = False
) -> RunConfig:
    """The settings with `train.ranks` = ranks (None: unchanged), which under torchrun is the number of its processes.

    Resuming, torchrun may start another number than the run has had; else UsageError if both are set and differ.
    """
    place = RankInfo.from_environment()
    stated = config.train.ranks if ranks is None else ranks
    if place is not None:
        if stated not in (0, place.ranks) and (ranks is not None or not resuming):
            raise UsageError(
                f"train.ranks: {stated}, but torchrun started {place.ranks} processes; leave it out"
            )
        stated = place.ranks
    if stated == config.train.ranks:
        return config
    tree = config.model_dump()
    tree["train"]["ranks"] = stated
    if not stated:
        del tree["train"]["rank_timeout"]  # nobody is left to wait for
    return resolve(tree)


@dataclass(frozen=True, slots=True)
class LaunchedRanks:
    """The processes of the other ranks, on their way."""

    place: RankInfo  # of this process
    store: dist.Store  # that all ranks share until they know each other
    host: str  # what this machine is called by theirs
    publish_address: Callable[
        [str], None
    ]  # them, where it listens and the token it wants (channel.advertised)
    check_alive: Callable[[], None]  # RankLost if one of them will never come


LaunchRanks: TypeAlias = Callable[[RunConfig], AbstractContextManager[LaunchedRanks]]
