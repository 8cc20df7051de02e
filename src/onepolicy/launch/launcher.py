"""The launcher of a run: it starts the learner's ranks and builds the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onepolicy.build.engines import BuildEngine, build_engine
from onepolicy.config import RunConfig
from onepolicy.launch.rank_info import LaunchRanks

if TYPE_CHECKING:
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


@dataclass(frozen=True, slots=True)
class Launcher:
    """Functions that start the learner's other ranks and build the engine."""

    launch_ranks: LaunchRanks | None = None  # None: launch_local_ranks, which also serves torchrun
    build_engine: BuildEngine = build_engine


LOCAL_LAUNCHER = Launcher()
"""The launcher for this machine. The engine lives in this process, unless it is a server."""
