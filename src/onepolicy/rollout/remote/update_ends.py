"""The two ends of a broadcast to a server: the request that makes it receive, and the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from onepolicy.config import TrainingError
from onepolicy.rollout.remote.client import EngineLost, host_and_port
from onepolicy.sync.broadcast import ReceiverLost, UpdateCancelled
from onepolicy.sync.group import local_address

T = TypeVar("T")


def sender_address(url: str, server: str) -> str:
    """Return the address of this machine that the server sees. server: its name in errors.

    Raises EngineLost if nothing listens there.
    """
    try:
        return local_address(*host_and_port(url))
    except OSError as error:
        raise EngineLost(
            f"rollout.engine.url: {server} at {url} cannot be reached: {error}"
        ) from error


async def run_both_ends(
    receive: Coroutine[Any, Any, list[str]],
    send: Coroutine[Any, Any, T],
    timeout_s: float,
    server: str,
) -> T:
    """Run both ends at once. Return the result of sending, or raise the first cause of a failure.

    receive: returns the problems of the server's processes. timeout_s: for one end after the other
    has ended. An end that is silent then has an error that says so. server: its name in errors.
    """
    receiving, sending = asyncio.ensure_future(receive), asyncio.ensure_future(send)
    try:
        await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((receiving, sending), timeout=timeout_s)
        problems: list[str] | BaseException = EngineLost(
            f"rollout.engine.url: {server} did not say within {timeout_s:g} s "
            "(rollout.engine.timeout_s) whether it has loaded the weights that it was sent"
        )
        failed: BaseException | None = ReceiverLost(
            f"weight sync: {timeout_s:g} s (rollout.engine.timeout_s) after {server} has ended "
            "the update, the weights are still being sent to it"
        )
        if receiving.done():
            problems = receiving.exception() or receiving.result()
        if sending.done():
            failed = sending.exception()
        _raise_first_cause(problems, failed)
        return sending.result()
    finally:
        receiving.cancel()
        sending.cancel()


def _raise_first_cause(problems: list[str] | BaseException, cause: BaseException | None) -> None:
    """Raise the error that an update failed with, if any.

    problems: of the server's processes, or the error of asking them. cause: the sender's error. If
    it failed on its own account, the server has failed for its sake.
    """
    if isinstance(problems, BaseException):
        if cause is not None and not isinstance(cause, ReceiverLost):
            raise cause from problems
        if isinstance(problems, EngineLost) and not isinstance(cause, UpdateCancelled | None):
            raise EngineLost(f"{problems}; the sending end: {cause}") from problems
        raise problems
    if problems and (cause is None or isinstance(cause, UpdateCancelled)):
        raise TrainingError(problems[0])
    if cause is not None:
        raise cause
