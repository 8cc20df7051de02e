"""The other ranks, as the driver sees them: tell them all, hear from them all, notice at once when one is gone."""

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
"""Interrupts the driver's main thread as Ctrl-C does; SIGINT itself is ignored in what a script starts with `&`."""
LAST_WORDS = 3.0
"""Seconds the driver has to say itself why a rank has gone, before its main thread is interrupted."""
STUCK = 30.0
"""Seconds after which an interrupted driver, stuck in a collective, is ended."""
HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ErrorReport(TypedDict):
    """What is told of an error."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    error: str
    kind: str


def error_message(error: Exception) -> Message:
    """What a rank answers when a command failed; its process ends after that."""
    kind = type(error).__name__
    return Message({"error": str(error) or kind, "kind": kind})


class RankGroup:
    """channels: of ranks 1..N-1, in order. limit: seconds to wait for any of them."""

    def __init__(self, channels: Mapping[int, Channel], *, limit: float) -> None:
        self.channels = dict(sorted(channels.items()))
        self.limit = limit
        self.lost: RankLost | None = None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="onepolicy-ranks")
        self._watcher.start()

    @property
    def ranks(self) -> int:
        return len(self.channels) + 1

    def send(self, messages: Sequence[Message]) -> None:
        """messages[i] to rank i + 1."""
        for channel, message in zip(self.channels.values(), messages, strict=True):
            channel.send(message, self.limit)

    def broadcast(self, message: Message) -> None:
        self.send([message] * len(self.channels))

    def recv(self) -> list[Message]:
        """One answer of each rank, in their order; the error of the rank that failed first, if one has."""
        answers, failed = self._listen(self.limit)
        if failed is not None:
            raise failed
        return answers

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        """Around collectives: one that fails here does so because another rank failed; raises that one's error."""
        try:
            yield
        except TrainingError:
            raise
        except RuntimeError as error:  # the only kind torch's collectives raise
            _, failed = self._listen(LAST_WORDS)
            if failed is not None and failed.cause != FailureCause.SILENT:
                raise failed from error
            raise TrainingError(
                f"the ranks cannot go on together: {str(error).splitlines()[0]}"
            ) from error

    def _listen(self, limit: float) -> tuple[list[Message], RankLost | None]:
        """Answers, and the failure that is likeliest the first: when one rank goes, the others' collectives fail."""
        answers: list[Message] = []
        failed: list[RankLost] = []
        for channel in self.channels.values():
            try:
                answers.append(
                    self._checked(channel, channel.receive(LAST_WORDS if failed else limit))
                )
            except RankLost as error:
                failed.append(error)
        return answers, max(failed, key=lambda error: error.cause, default=None)

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()  # it sends no signal from here on
        for channel in self.channels.values():
            channel.close()

    def _checked(self, channel: Channel, answer: Message) -> Message:
        if "error" not in answer.header:
            return answer
        told = validate_message(ErrorReport, answer.header, f"the error of {channel.peer}")
        if (kind := ERRORS.get(told["kind"])) is None:
            raise RankLost(
                f"{channel.peer} has ended: {told['kind']}: {told['error']}", FailureCause.TOLD
            )
        raise kind(f"{channel.peer}: {told['error']}")

    def _watch(self) -> None:
        """A rank that goes while the driver is busy with rollouts ends the run now, not at the next command."""
        poll = select.poll()
        of = {channel.connection.fileno(): channel for channel in self.channels.values()}
        for handle in of:
            poll.register(handle, HUNG_UP)
        found: list[tuple[int, int]] = []
        while not found:
            if self._closed.wait(0.2):
                return
            found = poll.poll(0)
        self.lost = RankLost(
            f"{of[found[0][0]].peer} has ended; `--resume` continues after the last checkpoint"
        )
        if self._closed.wait(LAST_WORDS):
            return
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE)
        if not self._closed.wait(STUCK):
            print(f"onepolicy: {self.lost}", file=sys.stderr, flush=True)
            os._exit(1)


@dataclass(frozen=True, slots=True)
class DistributedContext:
    """What this process has of a run's ranks."""

    device: torch.device  # its own
    mesh: DeviceMesh
    rank_group: RankGroup | None  # the other ranks; None: this is one of those
