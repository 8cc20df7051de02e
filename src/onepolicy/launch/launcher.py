"""Where the processes of a run live besides the driver's: what starts them."""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.build.engines import BuildEngine, build_engine
from onepolicy.launch.ranks import Launch, launch_here


@dataclass(frozen=True, slots=True)
class Hosts:
    """The learner's other ranks, and the engine."""

    launch: Launch = launch_here
    build_engine: BuildEngine = build_engine


HERE = Hosts()
"""On this machine, the engine in this process unless it is a server."""
