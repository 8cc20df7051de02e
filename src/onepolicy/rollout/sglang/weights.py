"""The learner's tensors into a running SGLang server: broadcast over a group of the two, or read from a folder.

`/update_weights_from_tensor` is left out: its payload is a pickle, and a bad one kills the server.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.rollout.http import EngineClient, Malformed

T = TypeVar("T")
BUCKET_BYTES = 2**28  # the server holds this much beside its weights
JOIN_S = 60.0


def done(reply: Any) -> None:
    """For replies that say whether they did what was asked."""
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise Malformed(str(reply)[:200])


async def from_folder(client: EngineClient, folder: str, name: str, *, flush: bool) -> None:
    """The server reads a checkpoint that it sees under this path. name: what the server shall call these weights."""
    body = {"model_path": folder, "weight_version": name, "flush_cache": flush, "abort_all_requests": False}
    await client.post("/update_weights_from_disk", body, parse=done)


async def broadcast(
    client: EngineClient,
    tensors: Mapping[str, Tensor],
    name: str,
    *,
    backend: str,
    ranks: int,
    timeout_s: float,
    flush: bool,
) -> None:
    """tensors: under their checkpoint names. ranks: of the server, which are 1.. in the group; this process is 0.

    client: one that tries once, because a broadcast cannot be repeated from one end. Joining a group takes little and
    a server that was restarted knows nothing of an old one, so every update has a group of its own.
    """
    group_name = f"onepolicy-{secrets.token_hex(4)}"
    store = dist.TCPStore("localhost", 0, None, True, timedelta(seconds=JOIN_S), wait_for_workers=False)
    joining = {
        "master_address": own_address(client.url),
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": group_name,
        "backend": backend,
    }
    _, group = await asyncio.gather(
        client.post("/init_weights_update_group", joining, parse=done),
        in_thread(lambda: _group(store, group_name, backend, 1 + ranks, timeout_s)),
    )
    await client.post("/begin_weight_update", {}, parse=done)
    try:
        buckets = list(in_buckets(tensors))
        for bucket in buckets:
            last = bucket is buckets[-1]
            body = update_body(bucket, group_name, name if last else None, flush=flush and last)
            await asyncio.gather(
                client.post("/update_weights_from_distributed", body, parse=done),
                in_thread(partial(_send, group, bucket)),
            )
    except BaseException:
        with suppress(TrainingError):  # what went wrong first is what to tell
            await _leave(client, group_name)
        raise
    await _leave(client, group_name)


async def _leave(client: EngineClient, group_name: str) -> None:
    """Or the server would refuse to begin another update."""
    await client.post("/end_weight_update", {}, parse=done, timeout_s=JOIN_S)
    await client.post("/destroy_weights_update_group", {"group_name": group_name}, parse=done, timeout_s=JOIN_S)


def update_body(bucket: Mapping[str, Tensor], group: str, name: str | None, *, flush: bool) -> dict[str, Any]:
    return {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.values()],
        "group_name": group,
        "load_format": "flattened_bucket",  # one tensor of all their bytes
        "flush_cache": flush,
        "abort_all_requests": False,
        "weight_version": name,
    }


def in_buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Wider dtypes first, so that every tensor starts at a multiple of its item size, as the server demands."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def own_address(url: str) -> str:
    """This machine's address as the server sees it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "", port), timeout=JOIN_S) as connection:
        return connection.getsockname()[0]


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a process may end while the work hangs: the other end is gone, or refused."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None] = future.set_result
        value: T | TrainingError
        try:
            value = work()
        except (RuntimeError, OSError) as error:  # what torch.distributed raises
            setter = future.set_exception
            value = TrainingError(f"rollout.engine.sync: the broadcast of the weights failed: {error}")
        with suppress(RuntimeError):  # nobody waits any more, the loop is closed
            loop.call_soon_threadsafe(settle, setter, value)

    threading.Thread(target=run, daemon=True, name="onepolicy weight broadcast").start()
    return await future


def _group(store: dist.TCPStore, name: str, backend: str, size: int, timeout_s: float) -> Any:
    """Rank 0 of the group that the server joins by torch's init_process_group. Not the default group, and not known to
    torch.distributed's global state. The prefixes are those under which torch keeps a group's keys in a store."""
    device = "cpu" if backend == "gloo" else "cuda"
    prefixed = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, 0, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(prefixed, 0, size, options)


def _send(group: Any, tensors: Mapping[str, Tensor]) -> None:
    flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()])
    if isinstance(group, dist.ProcessGroupGloo):
        flat = flat.cpu()
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([flat], options).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
