"""The rank of this process, and the interface through which ranks are launched."""

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

from onepolicy.config import RunConfig, UsageError
from onepolicy.models.load import parse_device


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int
    single_node: bool  # all ranks are on this machine

    @classmethod
    def from_environment(cls) -> RankInfo | None:
        """Read the variables of a process that torchrun or `launch_local_ranks` started.

        Return None in any other process.
        """
        env = os.environ
        if not {"RANK", "WORLD_SIZE"} <= env.keys():
            return None
        world_size = int(env["WORLD_SIZE"])
        local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
        local_rank = int(env.get("LOCAL_RANK", env["RANK"]))
        return cls(int(env["RANK"]), world_size, local_rank, local_world_size == world_size)

    def select_device(self, name: str) -> torch.device:
        """Return this rank's device.

        On CUDA every rank gets its own GPU of its machine, and makes it the current one. Raises
        UsageError if the machine has fewer GPUs than ranks.
        """
        device = parse_device(name)
        if device.type == "cpu":
            return device
        index = device.index
        if index is None:
            index = self.local_rank
            if index >= torch.cuda.device_count():
                raise UsageError(
                    f"train.ranks: rank {self.rank} is number {index + 1} on its machine, "
                    f"which has {torch.cuda.device_count()} CUDA devices; "
                    "use as many ranks as GPUs"
                )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device

    def join_process_group(
        self, store: dist.Store, device: torch.device, timeout: float
    ) -> DeviceMesh:
        """Initialise the default process group and return a mesh over it.

        Tensors in host memory use gloo. timeout: seconds that a collective may take.
        """
        backend = "cpu:gloo,cuda:nccl"
        if device.type == "cpu":
            backend = "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout),
        )
        return init_device_mesh(device.type, (self.world_size,))


@dataclass(frozen=True, slots=True)
class LaunchedRanks:
    """Processes of the other ranks, which may still be starting."""

    rank_info: RankInfo  # of this process
    store: dist.Store  # shared by all ranks until they are connected
    host: str  # address of this machine as the other ranks see it
    # Sends the driver's address and token (channel.encode_address) to the other ranks.
    publish_address: Callable[[str], None]
    check_alive: Callable[[], None]  # raises RankLost if a rank has ended before it joined


LaunchRanks: TypeAlias = Callable[[RunConfig], AbstractContextManager[LaunchedRanks]]
