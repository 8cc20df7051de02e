"""The processes of a learner on several ranks, from the moment they are started.

Torchrun, `launch/agent.py` and Ray start them. All of them join one process group. Rank 0 then runs
the command; the others make the calls that it announces, until the run ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import TypedDict

from onepolicy import __version__
from onepolicy.build.sharded_learner import BUILD, build_rank_learner
from onepolicy.config import ModelConfig, RunConfig, TrainingError, UsageError
from onepolicy.launch.agent import RENDEZVOUS_ENV
from onepolicy.models.load import parse_device
from onepolicy.sync.group import join_store
from onepolicy.sync.messages import validate_message
from onepolicy.train.sharded.rank import RankLearner
from onepolicy.train.sharded.ranks import (
    FAILED_KEY,
    POLL_S,
    Call,
    RankLost,
    Ranks,
    process_key,
)

TORCHRUN_RENDEZVOUS = "env://"
SETTINGS_KEY = "settings"  # in the ranks' store, written by rank 0
JOIN_TIMEOUT_S = 300.0
"""Seconds until the store is found, and Ray's rank 0 has left its settings there.

Later waits: train.rank_timeout."""
SETTINGS_TIMEOUT = timedelta(days=7)
"""Of the wait for the settings of a rank 0 that was started at the same time.

It checks a checkpoint before, which takes half an hour of a large one, and waits for servers.
Whoever started the ranks ends the others when it ends."""
REPORT_S = 30.0
"""Seconds that rank 0 has to report why it fails. Its end then ends the others before."""
LOOK_S = 1.0
"""Seconds between two looks whether rank 0 has failed."""
REPORTED_ERRORS = (UsageError, TrainingError, RuntimeError, OSError, MemoryError)
"""Errors that a rank reports before it ends: our own, a failed collective, a full disk or memory.
"""


class RankSettings(TypedDict):
    """The settings that a rank needs to join the others."""

    limit: float  # seconds: train.rank_timeout
    device: str
    release: str  # of onepolicy on rank 0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> RankInfo | None:
        """Read torchrun's variables. Return None in a process without them."""
        env = os.environ
        if not {"RANK", "WORLD_SIZE"} <= env.keys():
            return None
        return cls(
            int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", env["RANK"]))
        )

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

    def join(
        self,
        store: dist.Store,
        settings: RankSettings,
        check_alive: Callable[[], None] = lambda: None,
    ) -> Ranks:
        """Join the other ranks. Tensors in host memory use gloo. check_alive: of LaunchedRanks."""
        device = self.select_device(settings["device"])
        store.set(process_key(self.rank), _this_process())
        backend = "cpu:gloo,cuda:nccl"
        if device.type == "cpu":
            backend = "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=settings["limit"]),
        )
        mesh = init_device_mesh(device.type, (self.world_size,))
        return Ranks(mesh, device, store, limit=settings["limit"], check_alive=check_alive)


@dataclass(frozen=True, slots=True)
class LaunchedRanks:
    """Processes of the other ranks, which may still be starting."""

    rank_info: RankInfo  # of this process
    store: dist.Store  # shared by all ranks
    check_alive: Callable[[], None] = lambda: None  # raises RankLost if one has ended already


LaunchRanks: TypeAlias = Callable[[RunConfig], AbstractContextManager[LaunchedRanks]]


@contextmanager
def joined_ranks(config: RunConfig, launch: LaunchRanks | None = None) -> Iterator[Ranks]:
    """Join the ranks of a run as rank 0 and yield them. End all of them on the way out.

    launch: starts the other processes. None: torchrun or `launch/agent.py` has.
    """
    with (launch or launched_ranks)(config) as launched:
        limit = config.train.rank_timeout
        settings: RankSettings = {
            "limit": limit,
            "device": config.train.device,
            "release": __version__,
        }
        launched.store.set(SETTINGS_KEY, json.dumps(settings))
        _await_ranks(launched, limit)
        ranks = launched.rank_info.join(launched.store, settings, launched.check_alive)
        failed = True
        try:
            yield ranks
            failed = False
        except KeyboardInterrupt:
            failed = False
            raise
        finally:
            ranks.end(failed=failed)


def _await_ranks(launched: LaunchedRanks, limit: float) -> None:
    """Wait until every rank's process has found the store. Raises RankLost, which names it."""
    deadline = time.monotonic() + limit
    for rank in range(1, launched.rank_info.world_size):
        while not launched.store.check([process_key(rank)]):
            launched.check_alive()
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} did not come within {limit:g} s (train.rank_timeout)")
            time.sleep(POLL_S)


def launched_ranks(config: RunConfig) -> AbstractContextManager[LaunchedRanks]:
    """Return the ranks that torchrun or `launch/agent.py` started beside this process."""
    rank_info = RankInfo.from_environment()
    if rank_info is None:
        raise UsageError(
            f"train.ranks: {config.train.ranks}, but only `onepolicy train` and torchrun start "
            "ranks; give train.ranks=0 here"
        )
    return nullcontext(
        LaunchedRanks(rank_info, open_rendezvous(rank_info, config.train.rank_timeout))
    )


def open_rendezvous(rank_info: RankInfo, timeout: float) -> dist.Store:
    """Return the store that all ranks share. timeout: of its waits [s]."""
    url = os.environ.get(RENDEZVOUS_ENV, TORCHRUN_RENDEZVOUS)
    if url.startswith("file"):
        url = f"{url}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    store, _, _ = next(dist.rendezvous(url, timeout=timedelta(seconds=timeout)))
    return store


def run_launched_rank() -> int:
    """Run the rank above 0 that this process is. Return its exit status."""
    # Ctrl-C reaches all processes of a terminal. Rank 0 decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rank_info = RankInfo.from_environment()
    assert rank_info is not None
    store = open_rendezvous(rank_info, JOIN_TIMEOUT_S)
    threading.Thread(target=_end_after_rank_0, args=(store,), daemon=True).start()
    store.wait([SETTINGS_KEY], SETTINGS_TIMEOUT)
    status = run_rank(rank_info, store)
    if status:
        time.sleep(REPORT_S)
    return status


def _end_after_rank_0(store: dist.Store) -> None:
    """End this process if rank 0 has failed, and nobody who started the ranks ends it before.

    It may wait in a collective that rank 0 has left, and does not see that before its time limit as
    long as rank 0's process lives.
    """
    with suppress(RuntimeError):  # the store has gone, and so have the ranks
        while not store.check([FAILED_KEY]):
            time.sleep(LOOK_S)
        time.sleep(REPORT_S)
        os.kill(os.getpid(), signal.SIGTERM)


def run_placed_rank(rank: int, world_size: int, store: tuple[str, int]) -> None:
    """Run a rank that a launcher has placed. store: host and port of the ranks' store."""
    run_rank(RankInfo(rank, world_size, 0), join_store(*store, JOIN_TIMEOUT_S))


def run_rank(rank_info: RankInfo, store: dist.Store) -> int:
    """Join the other ranks, then make the calls of rank 0 until the run ends.

    Returns an exit status. Raises UsageError or TrainingError, which name this rank, for an error
    that rank 0 does not have.
    """
    text = store.get(SETTINGS_KEY).decode()
    settings = validate_message(RankSettings, json.loads(text), "the ranks' settings")
    try:
        if settings["release"] != __version__:
            raise UsageError(
                f"onepolicy {__version__} is installed here, but rank 0 runs "
                f"{settings['release']}; install the same release on every machine"
            )
        ranks = rank_info.join(store, settings)
        logging.getLogger("onepolicy").setLevel(logging.ERROR)  # rank 0 warns of the same
        try:
            _repeat_calls(ranks)
        finally:
            ranks.end()
        return int(ranks.failed)
    except REPORTED_ERRORS as error:
        text = f"rank {rank_info.rank} ({_this_process()}): {error}"
        if isinstance(error, UsageError):
            raise UsageError(text) from error
        raise TrainingError(text) from error


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _repeat_calls(ranks: Ranks) -> None:
    learner: RankLearner | None = None
    for call in iter(ranks.next_call, None):
        with ranks.repeating():
            if call.name == BUILD:
                learner = _build_learner(call, ranks)
            else:
                assert learner is not None
                learner.repeat(call)


def _build_learner(call: Call, ranks: Ranks) -> RankLearner:
    config = RunConfig.model_validate_json(call.arguments["config"])
    model = ModelConfig.model_validate_json(call.arguments["model"])
    return build_rank_learner(config, model, ranks)
