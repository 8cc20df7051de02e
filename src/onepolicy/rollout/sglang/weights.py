"""The learner's tensors into a running SGLang server: broadcast over a group of the two, or read from a folder.

`/update_weights_from_tensor` is left out: its payload is a pickle, and a bad one kills the server.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.config.base import short_repr
from onepolicy.rollout.servers.http import EngineClient, host_and_port
from onepolicy.rollout.servers.replies import MalformedReply
from onepolicy.sync.group import (
    local_address,
    make_process_group,
    open_store,
    run_in_daemon_thread,
    start_broadcast,
    wait_for_broadcast,
)

T = TypeVar("T")
BUCKET_BYTES = 2**28  # the server holds this much beside its weights
JOIN_S = 60.0


def check_success(reply: Any) -> None:
    """For replies that say whether they did what was asked."""
    if not isinstance(reply, dict) or reply.get("success") is not True:
        raise MalformedReply(short_repr(reply))


async def load_from_folder(client: EngineClient, folder: str, name: str, *, flush: bool) -> None:
    """The server reads a checkpoint that it sees under this path. name: what the server shall call these weights."""
    body = {
        "model_path": folder,
        "weight_version": name,
        "flush_cache": flush,
        "abort_all_requests": False,
    }
    await client.post("/update_weights_from_disk", body, parse=check_success)


async def broadcast_weights(
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
    host = local_address(*host_and_port(client.url))
    store = open_store(host, JOIN_S)
    joining = {
        "master_address": host,
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": group_name,
        "backend": backend,
    }
    _, group = await asyncio.gather(
        client.post("/init_weights_update_group", joining, parse=check_success),
        _watched(lambda: _group(store, group_name, backend, 1 + ranks, host, timeout_s)),
    )
    await client.post("/begin_weight_update", {}, parse=check_success)
    try:
        buckets = list(in_buckets(tensors))
        for bucket in buckets:
            last = bucket is buckets[-1]
            body = update_body(bucket, group_name, name if last else None, flush=flush and last)
            await asyncio.gather(
                client.post("/update_weights_from_distributed", body, parse=check_success),
                _watched(partial(_send, group, bucket)),
            )
    except BaseException:
        with suppress(TrainingError):  # what went wrong first is what to tell
            await _leave(client, group_name)
        raise
    await _leave(client, group_name)


async def _leave(client: EngineClient, group_name: str) -> None:
    """Or the server would refuse to begin another update."""
    await client.post("/end_weight_update", {}, parse=check_success, timeout_s=JOIN_S)
    await client.post(
        "/destroy_weights_update_group",
        {"group_name": group_name},
        parse=check_success,
        timeout_s=JOIN_S,
    )


def update_body(
    bucket: Mapping[str, Tensor], group: str, name: str | None, *, flush: bool
) -> dict[str, Any]:
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


async def _watched(work: Callable[[], T]) -> T:
    try:
        return await run_in_daemon_thread(work)
    except (RuntimeError, OSError) as error:  # what torch.distributed raises
        raise TrainingError(
            f"rollout.engine.sync: the broadcast of the weights failed: {error}"
        ) from error


def _group(store: dist.Store, name: str, backend: str, size: int, host: str, limit: float) -> Any:
    """Rank 0 of the group that the server joins by torch's init_process_group. The prefixes are those under which torch
    keeps a group's keys in a store."""
    device = "cpu" if backend == "gloo" else "cuda"
    prefixed = dist.PrefixStore(
        f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    )
    return make_process_group(prefixed, 0, size, backend=backend, host=host, limit=limit)


def _send(group: Any, tensors: Mapping[str, Tensor]) -> None:
    flat = torch.cat(
        [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]
    )
    if isinstance(group, dist.ProcessGroupGloo):
        flat = flat.cpu()
    wait_for_broadcast(start_broadcast(group, flat), flat.device)
