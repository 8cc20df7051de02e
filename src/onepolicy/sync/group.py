"""A process group of its own between processes that share no other: not the default one, and not known to
torch.distributed's global state, so it meets no group of an engine or a learner."""

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
    """A key-value store that listens on this address of this machine only, on a port of its own choice.

    torch's own listens on all of them, and none knows a password. limit: seconds of every wait of ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
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
    connecting = timedelta(seconds=min(limit, CONNECT_S))
    store = dist.TCPStore(host, port, is_master=False, timeout=connecting, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=limit))
    return store


def own_address(host: str, port: int) -> str:
    """This machine's address as that one sees it. OSError if nothing listens there."""
    with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
        return connection.getsockname()[0]


def process_group(
    store: dist.Store, rank: int, size: int, *, backend: str, host: str, limit: float
) -> Any:
    """Waits until all have come. host: this machine's address for the others; gloo listens there only.

    backend: gloo or nccl. limit: seconds of every wait, also of each broadcast.
    """
    timeout = timedelta(seconds=limit)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def start_broadcast(group: Any, data: Tensor) -> Any:
    """From rank 0 to the others, in place; `finish` what is returned."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([data], options) if data.numel() else None


def finish(work: Any, device: torch.device) -> None:
    """RuntimeError if one of the group is gone or too slow."""
    if work is not None:
        work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a process may end while the work hangs: the other end is gone, or refused."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # for who waits
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="onepolicy weight sync").start()
    return await asyncio.wrap_future(done)
