"""A step's weights into the workers of a running vLLM server, as files or by broadcast; every tensor's checksum is
computed on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from onepolicy.config import TrainingError, VLLMServerConfig
from onepolicy.interfaces import Weights
from onepolicy.rollout.servers.http import EngineLost, place_of
from onepolicy.sync.broadcast import GivenUp, Sender
from onepolicy.sync.checksum import Checksums, Sums
from onepolicy.sync.group import in_thread, own_address
from onepolicy.sync.weight_files import WeightFiles

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""A method of rollout/vllm/worker.py and its arguments -> what each worker returned."""


def written(files: WeightFiles, weights: Weights, version: int) -> tuple[Path, Sums]:
    """Files of these tensors, and their checksums."""
    checksums = Checksums()
    folder = files.write(checksums.passing(weights), version)
    return folder, checksums.take()


async def from_files(call: CallWorkers, folder: Path, sums: Sums, version: int) -> None:
    """TrainingError if a worker has read other bytes than were written."""
    for worker, problem in enumerate(await call("onepolicy_load_files", str(folder), sums)):
        if problem["difference"] is not None:
            raise TrainingError(
                f"rollout.engine.sync_dir: weights of version {version} in {folder}, as worker {worker} of the vLLM "
                f"server read them: {problem['difference']}"
            )


async def by_broadcast(
    call: CallWorkers, weights: Weights, version: int, *, config: VLLMServerConfig, workers: int
) -> None:
    """call: one that tries once, because a broadcast cannot be repeated from one end."""
    assert config.sync != "disk"
    try:
        host = own_address(*place_of(config.url))
    except OSError as error:
        raise EngineLost(f"rollout.engine.url: the vLLM server at {config.url} cannot be reached: {error}") from error
    with Sender(receivers=workers, backend=config.sync, host=host, timeout_s=config.timeout_s) as sender:

        async def receive() -> list[str]:
            try:
                told = await call("onepolicy_receive", sender.invitation, version)
                problems = [each["problem"] for each in told if each["problem"]]
            except BaseException:
                sender.give_up()  # nobody will come any more
                raise
            if problems:
                sender.give_up()
            return problems

        sending = in_thread(partial(sender.send, weights, version))
        problems, sent = await asyncio.gather(receive(), sending, return_exceptions=True)
        if isinstance(problems, BaseException):
            raise problems
        if problems and isinstance(sent, GivenUp):
            raise TrainingError(problems[0])
        if isinstance(sent, BaseException):
            raise sent
