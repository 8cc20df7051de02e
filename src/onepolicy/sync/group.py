"""Process groups between processes that share no other group.

Such a group is not the default one and is unknown to torch.distributed's global state. It therefore
cannot clash with a group of an engine or of the learner.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
CONNECT_S = 60.0


def open_store(host: str, limit: float) -> dist.TCPStore:
    """Open a key-value store on a free port, listening only on this address of this machine.

    A store that torch opens by itself listens on every address. No torch store asks for a
    password. limit: timeout of every wait [s].
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=limit),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def join_store(host: str, port: int, limit: float) -> dist.TCPStore:
    """Connect to a store of `open_store`. limit: timeout of every wait [s]."""
    connect_timeout = timedelta(seconds=min(limit, CONNECT_S))
    store = dist.TCPStore(
        host, port, is_master=False, timeout=connect_timeout, wait_for_workers=False
    )
    store.set_timeout(timedelta(seconds=limit))
    return store


def local_address(host: str, port: int) -> str:
    """Return the address of this machine that the given host sees.

    Raises OSError if nothing listens on the port.
    """
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        return connection.getsockname()[0]


def make_process_group(
    store: dist.Store, rank: int, size: int, *, backend: str, host: str, limit: float
) -> Any:
    """Make a process group; wait until every rank has joined.

    backend: gloo or nccl. host: this machine's address for the other ranks, and the only address
    that gloo listens on. limit: timeout of every wait and of every broadcast [s]. NCCL's own is
    twice that: when it passes NCCL ends the process, so `wait_for_broadcast` must come first.
    """
    timeout = timedelta(seconds=limit)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def start_broadcast(group: Any, data: Tensor) -> Any:
    """Start an in-place broadcast from rank 0; pass the returned handle to `wait_for_broadcast`."""
    if not data.numel():
        return None
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([data], options)


def open_connections(group: Any, device: torch.device, limit: float) -> None:
    """Connect the group's ranks now. Every rank must call it, with the device that it sends from.

    NCCL connects in the first collective of a device and blocks there, without a time limit, until
    every rank has called one. A protocol in which one rank calls it before it sends the message
    that the others wait for would never end. Raises RuntimeError after `limit` seconds; the thread
    that blocks then stays behind.
    """

    def connect() -> None:
        first = start_broadcast(group, torch.zeros(1, device=device))
        wait_for_broadcast(first, device, limit)

    try:
        start_in_daemon_thread(connect).result(timeout=limit)
    except TimeoutError:
        raise RuntimeError(f"no connection within {limit:g} s") from None


def wait_for_broadcast(work: Any, device: torch.device, limit: float) -> None:
    """Wait for a broadcast. Raises RuntimeError if a rank of the group is gone or too slow.

    limit: of the wait [s]. Without one NCCL lets the stream wait, and synchronising would never
    end.
    """
    if work is not None:
        work.wait(timedelta(seconds=limit))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread.

    Unlike asyncio.to_thread, this lets the process exit while the work still hangs, for instance
    because the other process is gone.
    """
    return await asyncio.wrap_future(start_in_daemon_thread(work))


def start_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Start blocking work in a daemon thread. Return its result to come."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # the thread sets it although its caller has given up

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # re-raised where the result is waited for
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="onepolicy weight sync").start()
    return done
