"""One update of a vLLM server's weights: a broadcast to its workers, or files that they read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from onepolicy.config import TrainingError, VLLMServerConfig
from onepolicy.interfaces import NamedWeights
from onepolicy.rollout.servers.update_ends import run_both_ends, sender_address
from onepolicy.sync.broadcast import Sender
from onepolicy.sync.checksum import ChecksumAccumulator, ChecksumTable
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""A function of a worker method's name and arguments that returns each worker's result."""


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
    server = "the vLLM server"
    host = sender_address(config.one_url, server)
    with Sender(
        receivers=workers,
        backend=config.sync,
        host=host,
        timeout_s=config.timeout_s,
        bucket_bytes=config.bucket_bytes,
    ) as sender:

        async def receive() -> list[str]:
            try:
                results = await call("onepolicy_receive", sender.invitation, version)
                problems = [each["problem"] for each in results if each["problem"]]
            except BaseException:
                sender.cancel()
                raise
            if problems:
                sender.cancel()
            return problems

        send = run_in_daemon_thread(partial(sender.send, weights, version))
        await run_both_ends(receive(), send, config.timeout_s, server)
