"""Where the processes of a run live besides the driver's: what starts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onepolicy.build.engines import BuildEngine, build_engine
from onepolicy.config import RunConfig
from onepolicy.launch.rank_info import LaunchRanks

if TYPE_CHECKING:
    from onepolicy.train.sharded.team import Ranks


@contextmanager
def started_ranks(config: RunConfig, launch_ranks: LaunchRanks | None) -> Iterator[Ranks | None]:
    """The ranks of this run, which this process drives; None if train.ranks is 0. launch: None: `launch_here`."""
    if not config.train.ranks:
        yield None
        return
    from onepolicy.launch.ranks import started_ranks as start_processes

    with start_processes(config, launch_ranks) as ranks:
        yield ranks


@dataclass(frozen=True, slots=True)
class Launcher:
    """The learner's other ranks, and the engine."""

    launch_ranks: LaunchRanks | None = None  # None: launch_here, or torchrun has
    build_engine: BuildEngine = build_engine


LOCAL_LAUNCHER = Launcher()
"""On this machine, the engine in this process unless it is a server."""
