"""The launcher of a run: it starts the learner's ranks and builds the engine."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onepolicy.build.engines import BuildEngine, build_engine
from onepolicy.config import RunConfig, UsageError, resolve

if TYPE_CHECKING:
    from onepolicy.launch.ranks import LaunchRanks
    from onepolicy.train.sharded.ranks import Ranks


def started_ranks(
    config: RunConfig, launch_ranks: LaunchRanks | None
) -> AbstractContextManager[Ranks | None]:
    """Return the learner's ranks, None if train.ranks is 0. This process is rank 0.

    launch_ranks: starts the others. None: this process was started with them.
    """
    if not config.train.ranks:
        return nullcontext()
    from onepolicy.launch.ranks import joined_ranks

    return joined_ranks(config, launch_ranks)


def apply_torchrun_ranks(
    config: RunConfig, ranks: int | None = None, *, resumed: Path | None = None
) -> RunConfig:
    """Return the settings with `train.ranks` = ranks, or torchrun's number under torchrun.

    ranks: None leaves the setting unchanged. resumed: a run that goes on, which may have another
    number of processes under torchrun than before. Otherwise, raises UsageError if torchrun's
    number and a number that is set differ, and always if the other settings do not go with it.
    """
    requested = config.train.ranks if ranks is None else ranks
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # a process of torchrun
        world_size = int(os.environ["WORLD_SIZE"])
        may_differ = resumed is not None and ranks is None
        if requested not in (0, world_size) and not may_differ:
            raise UsageError(
                f"train.ranks: {requested}, but torchrun started {world_size} processes; leave "
                "train.ranks out"
            )
        requested = world_size
    if requested == config.train.ranks:
        return config
    tree = config.model_dump(exclude_unset=True)  # a GPU has defaults of its own
    try:
        return resolve(tree, [f"train.ranks={requested}"])
    except UsageError as error:
        if resumed is None:
            raise
        raise UsageError(
            f"{error}\n--resume keeps the other settings: keep train.ranks = {config.train.ranks}, "
            f"or fork the run with those that are named above: onepolicy train --from {resumed} "
            f"out=... train.ranks={requested} ..."
        ) from None


@dataclass(frozen=True, slots=True)
class Launcher:
    """Functions that start the learner's other ranks and build the engine."""

    launch_ranks: LaunchRanks | None = None  # None: torchrun or launch/agent.py has started them
    build_engine: BuildEngine = build_engine


LOCAL_LAUNCHER = Launcher()
"""The launcher for this machine. The engine lives in this process, unless it is a server."""
