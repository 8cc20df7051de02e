"""Processes of a learner on several ranks: how they are started, joined and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from onepolicy.config import RunConfig
from onepolicy.launch.rank_info import LaunchedRanks, LaunchRanks, RankInfo
from onepolicy.train.sharded.channel import Channel, RankListener, RankLost, encode_address
from onepolicy.train.sharded.rank_group import WAKE, DistributedContext, RankGroup
from onepolicy.train.sharded.wire import Message

DRIVER_KEY = "driver"  # key in the rendezvous store: address and token of the driver
RENDEZVOUS_ENV = "ONEPOLICY_RENDEZVOUS"  # environment variable: URL of the rendezvous store
TORCHRUN_RENDEZVOUS = "env://"
LOOPBACK = "127.0.0.1"
GLOO_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
EXIT_TIMEOUT_S = 5.0
"""Seconds that a rank has to end by itself before it is killed."""


@contextmanager
def started_rank_processes(
    config: RunConfig, launch_ranks: LaunchRanks | None = None
) -> Iterator[DistributedContext]:
    """Start the ranks of a run with train.ranks > 0 and yield them. End all of them on the way out.

    launch_ranks: starts the other processes; None means `launch_local_ranks`.
    """
    timeout = config.train.rank_timeout
    with (launch_ranks or launch_local_ranks)(config) as launched:
        rank_info = launched.rank_info
        device = rank_info.select_device(config.train.device)
        channels = _accept_ranks(launched, timeout)
        previous_handler = signal.signal(WAKE, signal.default_int_handler)
        rank_group = RankGroup(channels, limit=timeout)
        try:
            rank_group.broadcast(Message({"limit": timeout, "device": config.train.device}))
            mesh = rank_info.join_process_group(launched.store, device, timeout)
            yield DistributedContext(device, mesh, rank_group)
            rank_group.broadcast(Message({"do": "stop"}))
        except KeyboardInterrupt:
            if rank_group.lost is not None:  # the lost rank caused this interrupt
                raise rank_group.lost from None
            raise
        finally:
            rank_group.close()
            signal.signal(WAKE, previous_handler)
            if dist.is_initialized():
                dist.destroy_process_group()


def _accept_ranks(launched: LaunchedRanks, timeout: float) -> dict[int, Channel]:
    listener = RankListener(launched.host)
    launched.publish_address(encode_address(listener.address, listener.token))
    try:
        return listener.accept(launched.rank_info.world_size, timeout, launched.check_alive)
    finally:
        listener.close()


def open_rendezvous(url: str, rank_info: RankInfo, timeout: float) -> dist.Store:
    """Return the store that all ranks share until they are connected."""
    if url.startswith("file"):
        url = f"{url}?rank={rank_info.rank}&world_size={rank_info.world_size}"
    store, _, _ = next(dist.rendezvous(url, timeout=timedelta(seconds=timeout)))
    return store


@contextmanager
def launch_local_ranks(config: RunConfig) -> Iterator[LaunchedRanks]:
    """Start processes on this machine, or use those of torchrun.

    Processes that are started here meet over the loopback and a private folder. Torchrun's
    processes are also ended by torchrun.
    """
    rank_info = RankInfo.from_environment()
    if rank_info is not None:
        yield _torchrun_ranks(rank_info, config.train.rank_timeout)
        return
    rank_info = RankInfo(0, config.train.ranks, 0, True)
    children: list[subprocess.Popen] = []
    with gloo_on_loopback(), tempfile.TemporaryDirectory(prefix="onepolicy-ranks-") as folder:
        url = f"file://{folder}/store"
        try:
            _start_children(children, rank_info.world_size, url, config.train.threads)
            store = open_rendezvous(url, rank_info, config.train.rank_timeout)
            publish_address = partial(store.set, DRIVER_KEY)
            check_alive = partial(_check_children_alive, children)
            yield LaunchedRanks(rank_info, store, LOOPBACK, publish_address, check_alive)
        finally:
            _wait_for_exit(children)


def _torchrun_ranks(rank_info: RankInfo, timeout: float) -> LaunchedRanks:
    store = open_rendezvous(TORCHRUN_RENDEZVOUS, rank_info, timeout)
    host = os.environ["MASTER_ADDR"]
    if rank_info.single_node:
        host = LOOPBACK
    return LaunchedRanks(rank_info, store, host, partial(store.set, DRIVER_KEY), lambda: None)


def _start_children(
    children: list[subprocess.Popen], world_size: int, url: str, threads: int | None
) -> None:
    """Start ranks 1..world_size-1.

    Each is appended to `children` at once, so that the caller can end it after an error.
    """
    threads = threads or max(1, (os.cpu_count() or 1) // world_size)
    command = [sys.executable, "-m", "onepolicy", "train"]
    for rank in range(1, world_size):
        variables = {
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": str(threads),
            RENDEZVOUS_ENV: url,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        children.append(subprocess.Popen(command, env={**os.environ, **variables}))


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Make gloo use the loopback, here and in child processes.

    An interface that the environment names takes precedence.
    """
    previous = os.environ.get(GLOO_INTERFACE_ENV)
    os.environ.setdefault(GLOO_INTERFACE_ENV, loopback_interface())
    try:
        yield
    finally:
        if previous is None:
            del os.environ[GLOO_INTERFACE_ENV]


def loopback_interface() -> str:
    """Return the name of the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _check_children_alive(children: list[subprocess.Popen]) -> None:
    """Raise RankLost if a process has ended."""
    for rank, child in enumerate(children, start=1):
        exit_code = child.poll()
        if exit_code is not None:
            raise RankLost(
                f"rank {rank} ended with exit code {exit_code} before it had joined; "
                "its error is above"
            )


def _wait_for_exit(children: list[subprocess.Popen]) -> None:
    """Wait until all processes have ended.

    Their connections are closed, so they end; kill those that do not.
    """
    for child in children:
        try:
            child.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
