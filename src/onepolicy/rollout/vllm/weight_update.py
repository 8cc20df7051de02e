"""One update of a vLLM server's weights: a broadcast to its workers, or files that they read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from onepolicy.config import TrainingError, VLLMServerConfig
from onepolicy.interfaces import NamedWeights
from onepolicy.rollout.servers.replies import MalformedReply, get_field
from onepolicy.rollout.servers.update_ends import run_both_ends, sender_address
from onepolicy.sync.broadcast import Sender
from onepolicy.sync.checksum import ChecksumAccumulator, ChecksumTable
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""A function of a worker method's name and arguments that returns each worker's result."""
REPORTED = {
    "onepolicy_load_files": ("difference",),
    "onepolicy_receive": ("problem",),
    "onepolicy_receive_adapter": ("problem", "folder"),
    "onepolicy_read_adapter": ("difference", "folder"),
}
"""Worker method -> the fields of its result, each a text or null."""


def read_results(reply: Any, method: str, workers: int) -> list[Any]:
    """Return each worker's result of a method.

    Raises MalformedReply unless every worker has one, with the method's fields.
    """
    results: list[Any] = get_field(reply, "results", list)
    if method not in REPORTED:
        return results
    if len(results) != workers:
        raise MalformedReply(f"results of {method}: {len(results)} of {workers} workers")
    for result in results:
        for name in REPORTED[method]:
            if not isinstance(result, dict) or name not in result:
                raise MalformedReply(f"results of {method}: one has no {name}")
            if result[name] is not None:
                get_field(result, name, str)
    return results


def write_weight_files(
    files: WeightFiles, weights: NamedWeights, version: int
) -> tuple[Path, ChecksumTable]:
    """Write the tensors to files. Return their folder and their checksums."""
    checksums = ChecksumAccumulator()
    folder = files.write_version(checksums.add_each(weights), version)
    return folder, checksums.pop_all()


async def load_weight_files(
    call: CallWorkers, folder: Path, sums: ChecksumTable, version: int
) -> None:
    """Make the workers load the files. Raise TrainingError if one reads other bytes."""
    results = await call("onepolicy_load_files", str(folder), sums)
    for worker, result in enumerate(results):
        if result["difference"] is not None:
            raise TrainingError(
                f"rollout.engine.sync_dir: weights of version {version} in {folder}, as worker "
                f"{worker} of the vLLM server read them: {result['difference']}"
            )


async def broadcast_weights(
    call: CallWorkers,
    weights: NamedWeights,
    version: int,
    *,
    config: VLLMServerConfig,
    workers: int,
) -> None:
    """Broadcast the weights to the workers.

    call: without retries, because one end cannot repeat a broadcast alone, and without a time
    limit. rollout.engine.timeout_s limits every wait of the sender, and the workers' replies once
    it has ended: a broadcast may take as long as it makes progress.
    """
    assert config.sync != "disk"
    await _broadcast(
        call,
        weights,
        version,
        "onepolicy_receive",
        config=config,
        workers=workers,
        backend=config.sync,
    )


async def broadcast_adapter(
    call: CallWorkers,
    tensors: dict[str, Tensor],
    version: int,
    settings: str,
    *,
    config: VLLMServerConfig,
) -> str:
    """Broadcast an adapter to the only worker, as `broadcast_weights`. Return its folder there.

    settings: content of adapter_config.json. Its tensors are in host memory, so gloo sends them
    where sync = nccl sends weights.
    """
    (result,) = await _broadcast(
        call,
        tensors.items(),
        version,
        "onepolicy_receive_adapter",
        settings,
        config=config,
        workers=1,
        backend="gloo",
    )
    return _folder_of(result)


async def write_adapter_files(
    call: CallWorkers,
    files: WeightFiles,
    tensors: dict[str, Tensor],
    version: int,
    settings: str,
) -> str:
    """Give an adapter to the only worker as files that it reads. Return its folder there.

    Raises TrainingError if the worker reads other bytes.
    """
    written = await asyncio.to_thread(write_weight_files, files, tensors.items(), version)
    folder, sums = written
    (result,) = await call("onepolicy_read_adapter", str(folder), sums, settings)
    if result["difference"] is not None:
        raise TrainingError(
            f"rollout.engine.sync_dir: the adapter of version {version} in {folder}, as the vLLM "
            f"server read it: {result['difference']}"
        )
    return _folder_of(result)


def _folder_of(result: Any) -> str:
    folder: str = result["folder"]
    if not folder:
        raise TrainingError("weight sync: the vLLM server did not say where it put the adapter")
    return folder


async def _broadcast(
    call: CallWorkers,
    weights: NamedWeights,
    version: int,
    method: str,
    *args: str,
    config: VLLMServerConfig,
    workers: int,
    backend: str,
) -> list[Any]:
    """Broadcast the weights to this method of the workers. Return its results."""
    server = "the vLLM server"
    host = sender_address(config.one_url, server)
    results: list[Any] = []
    with Sender(
        receivers=workers,
        backend=backend,
        host=host,
        timeout_s=config.timeout_s,
        bucket_bytes=config.bucket_bytes,
    ) as sender:

        async def receive() -> list[str]:
            try:
                results.extend(await call(method, sender.invitation, version, *args))
                problems = [each["problem"] for each in results if each["problem"]]
            except BaseException:
                sender.cancel()
                raise
            if problems:
                sender.cancel()
            return problems

        send = run_in_daemon_thread(partial(sender.send, weights, version))
        await run_both_ends(receive(), send, config.timeout_s, server)
    return results
