"""Weight sync to a running SGLang server, by broadcast in a process group or from a folder.

`/update_weights_from_tensor` is not used: its payload is a pickle, and a bad one kills the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.interfaces import NamedWeights
from onepolicy.rollout.remote.client import EngineClient
from onepolicy.rollout.remote.replies import check_success
from onepolicy.rollout.remote.update_ends import run_both_ends, sender_address
from onepolicy.sync.broadcast import ReceiverLost, UpdateCancelled
from onepolicy.sync.buckets import split_into_buckets
from onepolicy.sync.group import (
    make_process_group,
    open_store,
    run_in_daemon_thread,
    start_broadcast,
    wait_for_broadcast,
)

T = TypeVar("T")
BUCKET_BYTES = 2**28  # of memory that the server needs beside its weights
CLEANUP_S = 60.0  # most seconds for each request that ends a failed update
SERVER = "the SGLang server"


async def broadcast_weights(
    client: EngineClient,
    weights: NamedWeights,
    weights_id: str,
    *,
    backend: str,
    ranks: int,
    timeout_s: float,
    flush: bool,
    bucket_bytes: int | None = None,
) -> None:
    """Broadcast tensors with checkpoint names to the server, and hold one bucket at a time.

    client: without retries, because one end cannot repeat a broadcast alone. ranks: number of the
    server's ranks, which are 1 and up in the group; this process is rank 0. Every update makes a
    new group: joining is cheap, and a restarted server does not know the old group. timeout_s: of
    every bucket, and of the server's reply after the last one.
    """
    group_name = f"onepolicy-{secrets.token_hex(4)}"
    group = await _join_group(client, group_name, backend, 1 + ranks, timeout_s)
    try:
        await client.post("/begin_weight_update", {}, parse=check_success)
        buckets = in_buckets(weights, bucket_bytes)
        bucket = await _next_bucket(buckets)
        while bucket:
            following = await _next_bucket(buckets)
            body = update_body(bucket, group_name)
            if not following:
                body = update_body(bucket, group_name, weights_id, flush=flush)
            await _send_bucket(client, group, bucket, body, timeout_s)
            bucket = following
    except BaseException:
        with suppress(TrainingError, UsageError):  # raise the first error
            await _end_update(client, group_name, min(timeout_s, CLEANUP_S))
        raise
    await _end_update(client, group_name, timeout_s)


async def _join_group(
    client: EngineClient, group_name: str, backend: str, size: int, timeout_s: float
) -> Any:
    """Return a process group of this process and the server's ranks."""
    host = sender_address(client.url, SERVER)
    store = open_store(host, timeout_s)
    body = {
        "master_address": host,
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": size,
        "group_name": group_name,
        "backend": backend,
    }
    return await _beside_server(
        client.post("/init_weights_update_group", body, parse=check_success),
        lambda: _make_group(store, group_name, backend, size, host, timeout_s),
        timeout_s,
    )


async def _send_bucket(
    client: EngineClient,
    group: Any,
    bucket: Mapping[str, Tensor],
    body: dict[str, Any],
    timeout_s: float,
) -> None:
    flat = await run_in_daemon_thread(partial(_flatten_bucket, group, bucket))
    await _beside_server(
        client.post("/update_weights_from_distributed", body, parse=check_success),
        partial(_broadcast, group, flat, timeout_s),
        timeout_s,
    )


async def _next_bucket(buckets: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gather and return the next bucket, empty after the last, beside the event loop."""
    return await run_in_daemon_thread(partial(next, buckets, {}))


async def _end_update(client: EngineClient, group_name: str, timeout_s: float) -> None:
    """End the update. Otherwise the server would refuse to begin another one."""
    await client.post("/end_weight_update", {}, parse=check_success, timeout_s=timeout_s)
    await client.post(
        "/destroy_weights_update_group",
        {"group_name": group_name},
        parse=check_success,
        timeout_s=timeout_s,
    )


def update_body(
    bucket: Mapping[str, Tensor], group: str, weights_id: str | None = None, *, flush: bool = False
) -> dict[str, Any]:
    """Return the request that announces a bucket. weights_id: given with the last one."""
    return {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.values()],
        "group_name": group,
        "load_format": "flattened_bucket",  # one tensor of all their bytes
        "flush_cache": flush,
        "abort_all_requests": False,
        "weight_version": weights_id,
    }


def in_buckets(
    weights: NamedWeights, bucket_bytes: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in buckets of at most `bucket_bytes`, or of one larger tensor.

    A tensor is asked for when its bucket is. In a bucket wider dtypes come first, so that every
    tensor starts at a multiple of its item size, as the server requires.
    """
    for bucket in split_into_buckets(weights, bucket_bytes or BUCKET_BYTES):
        yield dict(sorted(bucket.items(), key=lambda item: -item[1].itemsize))


async def _beside_server(
    request: Coroutine[Any, Any, None], work: Callable[[], T], timeout_s: float
) -> T:
    """Return the result of `work`, which runs in a thread while the server answers the request.

    If the server fails, the thread is left behind, because nothing tells it so.
    """
    asking = asyncio.ensure_future(request)
    working = asyncio.ensure_future(run_in_daemon_thread(work))

    async def receive() -> list[str]:
        await asking
        return []

    async def send() -> T:
        try:
            await asyncio.wait((asking, working), return_when=asyncio.FIRST_EXCEPTION)
            if not working.done():
                raise UpdateCancelled(f"weight sync: given up, because {SERVER} failed")
            return working.result()
        finally:
            working.cancel()

    return await run_both_ends(receive(), send(), timeout_s, SERVER)


def _make_group(
    store: dist.Store, name: str, backend: str, size: int, host: str, limit: float
) -> Any:
    """Return rank 0 of the group that the server joins by torch's init_process_group.

    The prefixes are torch's prefixes of a group's keys in a store.
    """
    device = {"gloo": "cpu", "nccl": "cuda"}[backend]
    group_store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    prefixed = dist.PrefixStore(f"{device}/", group_store)
    try:
        return make_process_group(prefixed, 0, size, backend=backend, host=host, limit=limit)
    except RuntimeError as error:
        raise ReceiverLost(
            f"weight sync: the group with {SERVER} could not be made: {error}"
        ) from error


def _flatten_bucket(group: Any, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of all tensors, [size] uint8, on the device that the group sends from."""
    try:
        flat = torch.cat(
            [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
        )
        if isinstance(group, dist.ProcessGroupGloo):
            flat = flat.cpu()
        return flat
    except RuntimeError as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise TrainingError(
            f"weight sync: this process could not copy a bucket of {size:.0f} MiB of weights in "
            f"order to send it: {error}"
        ) from error


def _broadcast(group: Any, flat: Tensor, limit: float) -> None:
    try:
        wait_for_broadcast(start_broadcast(group, flat), flat.device, limit)
    except RuntimeError as error:
        raise ReceiverLost(
            f"weight sync: the broadcast of a bucket to {SERVER} failed: {error}"
        ) from error
