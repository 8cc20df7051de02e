"""The launcher of a run: it starts the learner's ranks and builds the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onepolicy.build.engines import BuildEngine, build_engine
from onepolicy.config import RunConfig, UsageError, resolve

if TYPE_CHECKING:
    from onepolicy.launch.rank_info import LaunchRanks
    from onepolicy.train.sharded.rank_group import DistributedContext


@contextmanager
def started_ranks(
    config: RunConfig, launch_ranks: LaunchRanks | None
) -> Iterator[DistributedContext | None]:
    """Start the learner's ranks and yield them; None if train.ranks is 0.

    This process drives them. launch_ranks: None means `launch_local_ranks`.
    """
    if not config.train.ranks:
        yield None
        return
    from onepolicy.launch.ranks import started_rank_processes

    with started_rank_processes(config, launch_ranks) as ranks:
        yield ranks


def apply_torchrun_ranks(
    config: RunConfig, ranks: int | None = None, *, resuming: bool = False
) -> RunConfig:
    """Return the settings with `train.ranks` = ranks, or torchrun's number under torchrun.

    ranks: None leaves the setting unchanged. A resumed run may have another number of processes
    under torchrun than before. Otherwise, raises UsageError if torchrun's number and a number that
    is set differ.
    """
    requested = config.train.ranks if ranks is None else ranks
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # a process of torchrun
        world_size = int(os.environ["WORLD_SIZE"])
        may_differ = resuming and ranks is None
        if requested not in (0, world_size) and not may_differ:
            raise UsageError(
                f"train.ranks: {requested}, but torchrun started {world_size} processes; leave "
                "train.ranks out"
            )
        requested = world_size
    if requested == config.train.ranks:
        return config
    tree = config.model_dump()
    tree["train"]["ranks"] = requested
    return resolve(tree)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Functions that start the learner's other ranks and build the engine."""

    launch_ranks: LaunchRanks | None = None  # None: launch_local_ranks, which also serves torchrun
    build_engine: BuildEngine = build_engine


LOCAL_LAUNCHER = Launcher()
"""The launcher for this machine. The engine lives in this process, unless it is a server."""
