"""The processes of a learner on several ranks: started here or by torchrun, joined, and ended together."""

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
from onepolicy.train.sharded.channel import Listener, RankLost, advertised
from onepolicy.train.sharded.team import WAKE, Ranks, Team
from onepolicy.train.sharded.wire import Message

DRIVER = "driver"  # key in the rendezvous store: where the ranks find the driver
WHERE = "ONEPOLICY_RENDEZVOUS"  # environment variable: where ranks that were started here meet
TORCHRUN = "env://"
LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
PATIENCE = 5.0
"""Seconds a rank gets to end by itself."""


@contextmanager
def started_ranks(config: RunConfig, launch: LaunchRanks | None = None) -> Iterator[Ranks | None]:
    """The ranks of this run, which this process drives; None if train.ranks is 0. Ends them all on the way out.

    launch: what starts the other processes; None: `launch_here`.
    """
    if not config.train.ranks:
        yield None
        return
    limit = config.train.rank_timeout
    with (launch or launch_local_ranks)(config) as launched:
        place = launched.place
        device = place.device(config.train.device)
        listener = Listener(launched.host)
        launched.publish_address(advertised(listener.address, listener.token))
        try:
            channels = listener.accept(place.ranks, limit, launched.check_alive)
        finally:
            listener.close()
        before = signal.signal(WAKE, signal.default_int_handler)
        team = Team(channels, limit=limit)
        try:
            team.tell_all(Message({"limit": limit, "device": config.train.device}))
            yield Ranks(device, place.join(launched.store, device, limit), team)
            team.tell_all(Message({"do": "stop"}))
        except KeyboardInterrupt:
            if team.gone is not None:  # it is what interrupted us
                raise team.gone from None
            raise
        finally:
            team.close()
            signal.signal(WAKE, before)
            if dist.is_initialized():
                dist.destroy_process_group()


def rendezvous(where: str, place: RankInfo, limit: float) -> dist.Store:
    """The store that all ranks share until they know each other."""
    url = (
        f"{where}?rank={place.rank}&world_size={place.ranks}" if where.startswith("file") else where
    )
    store, _, _ = next(dist.rendezvous(url, timeout=timedelta(seconds=limit)))
    return store


@contextmanager
def launch_local_ranks(config: RunConfig) -> Iterator[LaunchedRanks]:
    """Processes of this machine, talking over the loopback and a private folder; or those of torchrun, which then also
    ends them."""
    place, limit = RankInfo.from_environment(), config.train.rank_timeout
    if place is not None:
        store = rendezvous(TORCHRUN, place, limit)
        host = LOOPBACK if place.local else os.environ["MASTER_ADDR"]
        yield LaunchedRanks(place, store, host, partial(store.set, DRIVER), lambda: None)
        return
    place = RankInfo(0, config.train.ranks, 0, True)
    threads = config.train.threads or max(1, (os.cpu_count() or 1) // place.ranks)
    children: list[subprocess.Popen] = []
    with gloo_on_loopback(), tempfile.TemporaryDirectory(prefix="onepolicy-ranks-") as folder:
        where = f"file://{folder}/store"
        shared = {"WORLD_SIZE": place.ranks, "OMP_NUM_THREADS": threads, WHERE: where}
        try:
            for rank in range(1, place.ranks):
                own = {
                    name: str(value)
                    for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()
                }
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "onepolicy", "train"], env={**os.environ, **own}
                    )
                )
            store = rendezvous(where, place, limit)
            yield LaunchedRanks(
                place, store, LOOPBACK, partial(store.set, DRIVER), lambda: _alive(children)
            )
        finally:
            _end(children)


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Gloo of this process, and of those it starts, talks over the loopback unless told otherwise."""
    before = os.environ.get(INTERFACE)
    os.environ.setdefault(INTERFACE, loopback_interface())
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE]


def loopback_interface() -> str:
    """Name of its interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def _alive(children: list[subprocess.Popen]) -> None:
    for rank, child in enumerate(children, start=1):
        if (code := child.poll()) is not None:
            raise RankLost(
                f"rank {rank} ended with exit code {code} before it had joined; its error is above"
            )


def _end(children: list[subprocess.Popen]) -> None:
    """Their connection is closed, so they are ending."""
    for child in children:
        try:
            child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
