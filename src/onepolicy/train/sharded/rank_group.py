"""The other ranks, as the driver sees them: send to all, receive from all, notice a lost rank."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from pydantic import ConfigDict
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.checks import RoutingError
from onepolicy.sync.messages import validate_message
from onepolicy.train.sharded.channel import Channel, FailureCause, RankLost
from onepolicy.train.sharded.wire import Message

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (UsageError, TrainingError, RoutingError)
}
WAKE = signal.SIGUSR1
"""Interrupts the driver's main thread like Ctrl-C. SIGINT itself would not do: a process that a
shell script starts with `&` ignores it."""
REPORT_TIMEOUT_S = 3.0
"""Time for another rank's error report, and for the driver to fail by itself after a lost rank."""
STUCK_TIMEOUT_S = 30.0
"""Time after which an interrupted driver that is stuck in a collective is ended."""
HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ErrorReport(TypedDict):
    """The header of a message about an error."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    error: str
    kind: str


def error_message(error: Exception) -> Message:
    """Return a rank's answer to a command that failed. The rank's process ends after it."""
    kind = type(error).__name__
    return Message({"error": str(error) or kind, "kind": kind})


class RankGroup:
    """Channels to ranks 1..N-1, and a thread that watches them."""

    def __init__(self, channels: Mapping[int, Channel], *, limit: float) -> None:
        """Start to watch the ranks. limit: seconds to wait for each of them."""
        self.channels = dict(sorted(channels.items()))
        self.limit = limit
        self.lost: RankLost | None = None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="onepolicy-ranks")
        self._watcher.start()

    @property
    def world_size(self) -> int:
        """Number of ranks, the driver included."""
        return len(self.channels) + 1

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages[i] to rank i + 1."""
        for channel, message in zip(self.channels.values(), messages, strict=True):
            channel.send(message, self.limit)

    def broadcast(self, message: Message) -> None:
        """Send the same message to every rank."""
        self.send([message] * len(self.channels))

    def recv(self) -> list[Message]:
        """Return one answer of each rank, in their order.

        Raises the error of the rank that failed first, if one has failed.
        """
        answers, failure = self._receive_all(self.limit)
        if failure is not None:
            raise failure
        return answers

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        """Raise another rank's error if a collective in this context fails because of it."""
        try:
            yield
        except TrainingError:
            raise
        except RuntimeError as error:  # the only type that torch's collectives raise
            _, failure = self._receive_all(REPORT_TIMEOUT_S)
            if failure is not None and failure.cause != FailureCause.SILENT:
                raise failure from error
            raise TrainingError(
                f"the ranks cannot go on together: {str(error).splitlines()[0]}"
            ) from error

    def _receive_all(self, limit: float) -> tuple[list[Message], RankLost | None]:
        """Return the answers, and the failure that most likely came first.

        When one rank is lost, collectives on the other ranks fail too.
        """
        answers: list[Message] = []
        failures: list[RankLost] = []
        for channel in self.channels.values():
            if failures:
                limit = REPORT_TIMEOUT_S
            try:
                answers.append(self._raise_reported(channel, channel.receive(limit)))
            except RankLost as error:
                failures.append(error)
        return answers, max(failures, key=lambda error: error.cause, default=None)

    def _raise_reported(self, channel: Channel, answer: Message) -> Message:
        """Return the answer, or raise the error that it reports."""
        if "error" not in answer.header:
            return answer
        reported = validate_message(ErrorReport, answer.header, f"the error of {channel.peer}")
        kind = ERRORS.get(reported["kind"])
        if kind is None:
            raise RankLost(
                f"{channel.peer} has ended: {reported['kind']}: {reported['error']}",
                FailureCause.REPORTED,
            )
        raise kind(f"{channel.peer}: {reported['error']}")

    def close(self) -> None:
        """Stop watching and close the channels."""
        self._closed.set()
        self._watcher.join()  # it sends no signal from here on
        for channel in self.channels.values():
            channel.close()

    def _watch(self) -> None:
        """End the run when a rank is lost, even if the driver is busy with rollouts.

        Without this thread the driver would notice at its next command.
        """
        self.lost = self._wait_for_lost_rank()
        if self.lost is None or self._closed.wait(REPORT_TIMEOUT_S):
            return
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
        if not self._closed.wait(STUCK_TIMEOUT_S):
            print(f"onepolicy: {self.lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _wait_for_lost_rank(self) -> RankLost | None:
        """Return the error for the first rank that hangs up. None once the group is closed."""
        channels = {channel.connection.fileno(): channel for channel in self.channels.values()}
        poll = select.poll()
        for handle in channels:
            poll.register(handle, HUNG_UP)
        while not self._closed.wait(0.2):
            hung_up = poll.poll(0)
            if hung_up:
                peer = channels[hung_up[0][0]].peer
                return RankLost(f"{peer} has ended; `--resume` continues after the last checkpoint")
        return None


@dataclass(frozen=True, slots=True)
class DistributedContext:
    """The place of this process among a run's ranks."""

    device: torch.device  # of this process
    mesh: DeviceMesh
    rank_group: RankGroup | None  # the other ranks; None unless this process is the driver
