"""The ranks of a run: messages between rank 0 and the others over gloo, and their signs of life.

Rank 0 samples and holds the log. It sends every rank its own samples and receives what they found.
The agent that started the ranks ends all of them when one dies. The signs of life find what it
does not see: a rank that stands still, and a rank or a network on another machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onepolicy.config import TrainingError
from onepolicy.console import print_text
from onepolicy.train.sharded.wire import Message

BEAT_S = 1.0
"""Seconds between two signs of life."""
GRACE_S = 3.0
"""Seconds until a rank reports an error that may follow from another rank's."""
UNLIMITED = timedelta(days=365)
"""Timeout of a wait for rank 0. It ends when a sign of life is missing."""
RESUME = "`--resume` continues after the last checkpoint"


class Beat(IntEnum):
    """The sign of life of rank 0."""

    END = 0  # the run has ended
    GO_ON = 1
    FAILED = 2  # rank 0 reports an error and ends


class RankLost(TrainingError):
    """Raised if a rank does not come."""


def process_key(rank: int) -> str:
    """Return the key under which a rank leaves its process and host in the ranks' store."""
    return f"process/{rank}"


def error_key(rank: int) -> str:
    """Return the key under which a rank leaves its error before it ends."""
    return f"error/{rank}"


def rank_name(rank: int, store: dist.Store) -> str:
    """Return a rank's number, process and host, for errors."""
    return f"rank {rank} ({store.get(process_key(rank)).decode()})"


class Ranks:
    """The ranks of a run, as one of them sees the others. The default process group joins them."""

    def __init__(
        self, mesh: DeviceMesh, device: torch.device, store: dist.Store, *, limit: float
    ) -> None:
        """Begin the signs of life. Every rank must call this at the same time.

        device: of this process. store: shared by all ranks; has the key `process_key` of each.
        limit: seconds that a rank may be silent.
        """
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.mesh, self.device, self.limit = mesh, device, limit
        self.lost = threading.Event()  # set if a sign of life is missing
        self._store = store
        self._beats = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self._next_beat = threading.Event()  # set to end the beats
        self._last_beat = Beat.END
        self._awaited, self._since = 0, time.monotonic()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="onepolicy-ranks")
        self._thread.start()
        self._calls = dist.new_group(backend="gloo", timeout=UNLIMITED)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages[i] to rank i + 1."""
        with self.attribute_failures():
            for rank, message in enumerate(messages, start=1):
                self._send(message, rank, self._calls)

    def broadcast(self, message: Message) -> None:
        """Send the same message to every other rank."""
        self.send([message] * (self.world_size - 1))

    def recv(self) -> list[Message]:
        """Return one answer of each other rank, in their order."""
        with self.attribute_failures():
            return [self._receive(rank, None) for rank in range(1, self.world_size)]

    def next_message(self) -> Message:
        """Return the next message of rank 0, however long it samples."""
        return self._receive(0, self._calls)

    def answer(self, message: Message) -> None:
        """Send a message to rank 0."""
        self._send(message, 0, None)

    def _send(self, message: Message, rank: int, group: dist.ProcessGroup | None) -> None:
        data = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(data)], device="cpu"), rank, group=group)
        dist.send(data, rank)

    def _receive(self, rank: int, group: dist.ProcessGroup | None) -> Message:
        """Return the next message of a rank. group: decides the timeout of its first bytes."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.recv(size, rank, group=group)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.recv(data, rank)
        return Message.decode(data.numpy().tobytes(), f"rank {rank}")

    @contextmanager
    def attribute_failures(self) -> Iterator[None]:
        """Name the rank that is lost if a collective in this context fails because of it."""
        try:
            yield
        except TrainingError:
            raise
        except RuntimeError as error:  # the only type that torch's collectives raise
            if self.lost.wait(GRACE_S):
                time.sleep(2 * GRACE_S)  # `_end` ends this process
            raise TrainingError(
                f"the ranks cannot go on together{self._describe_wait()}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _describe_wait(self) -> str:
        """Return the rank whose sign of life is late, in brackets."""
        waited = time.monotonic() - self._since
        if waited < GRACE_S:
            return ""
        return f" ({rank_name(self._awaited, self._store)} has been silent for {waited:.0f} s)"

    # --- signs of life ----------------------------------------------------------------------------

    def _beat(self) -> None:
        """Exchange signs of life until rank 0 ends them."""
        beat = torch.ones(1, dtype=torch.uint8, device="cpu")
        try:
            while beat == Beat.GO_ON:
                if self.rank == 0:
                    self._beat_all(beat)
                else:
                    self._await(0)
                    dist.send(beat, 0, group=self._beats)
                    dist.recv(beat, 0, group=self._beats)
        except RuntimeError:
            self._end()
        if beat == Beat.FAILED and self.rank > 0:
            self._end()

    def _beat_all(self, beat: torch.Tensor) -> None:
        """Receive a sign of life from every rank, then send them the own one. Fills `beat`."""
        others = range(1, self.world_size)
        for rank in others:
            self._await(rank)
            dist.recv(torch.empty_like(beat), rank, group=self._beats)
        self._await(0)
        if self._next_beat.wait(BEAT_S):
            beat.fill_(self._last_beat)
        for rank in others:
            self._await(rank)
            dist.send(beat, rank, group=self._beats)

    def _await(self, rank: int) -> None:
        self._awaited, self._since = rank, time.monotonic()

    def _end(self) -> None:
        """End this process, because the awaited rank is lost. Rank 0 reports it."""
        waited = time.monotonic() - self._since
        self.lost.set()
        time.sleep(GRACE_S)  # whoever started the ranks knows the cause, and may end this process
        if self.rank == 0:
            print_text(f"onepolicy: {self._describe_loss(waited)}", stderr=True)
        os._exit(1)

    def _describe_loss(self, waited: float) -> str:
        """Return the reason for the loss of the awaited rank. waited: seconds without a beat."""
        name, key = rank_name(self._awaited, self._store), error_key(self._awaited)
        if self._store.check([key]):
            return f"{name}: {self._store.get(key).decode()}"
        if waited > 0.9 * self.limit:
            return f"{name} has been silent for {self.limit:g} s (train.rank_timeout); {RESUME}"
        return f"{name} has ended; {RESUME}"

    def close(self, *, failed: bool = False) -> None:
        """End the signs of life. On rank 0 this ends them on all ranks.

        failed: end the other ranks' processes too.
        """
        self._last_beat = Beat.FAILED if failed else Beat.END
        self._next_beat.set()
        if failed:
            self._thread.join(2 * BEAT_S)
            return
        self._thread.join()
        dist.destroy_process_group()
