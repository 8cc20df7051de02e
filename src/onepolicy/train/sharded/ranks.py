"""The ranks of a run, as each of them sees the others.

Rank 0 samples and holds the log. Whatever takes all ranks it announces to them with its batch, and
all make the same call (`Ranks.everywhere`). The agent that started the ranks ends all of them when
one dies. A rank that stands still is noticed by the time limit of the process group: also rank 0
while it samples, because then it announces now and then that there is no call yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onepolicy.config import TrainingError, UsageError, printable
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from onepolicy.types import TokenBatch

GRACE_S = 3.0
"""Seconds until a failure is reported: whoever started the ranks knows a death first."""
POLL_S = 0.05
ENDED_KEY = "ended"  # in the ranks' store: rank 0 has ended without an error
FAILED_KEY = "failed"  # the same, with one
NO_CALL_YET = -1  # in place of a call's size
ANNOUNCEMENTS = 4  # of it within the limit
MAX_CAUSE_CHARS = 500
COLLECTIVE = "/gloo/", "pair closure"  # of gloo's errors


class RankLost(TrainingError):
    """Raised if a rank does not come."""


def process_key(rank: int) -> str:
    """Return the key under which a rank leaves its process and host in the ranks' store."""
    return f"process/{rank}"


class Call(NamedTuple):
    """A call that all ranks make."""

    name: str
    batch: TokenBatch | None
    arguments: dict[str, Any]  # JSON


class Ranks:
    """The ranks of a run. The default process group joins them."""

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        store: dist.Store,
        *,
        limit: float,
        check_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Every rank must call this at the same time.

        device: of this process. store: shared by all ranks; has the key `process_key` of each.
        limit: seconds that a collective may take. check_alive: raises RankLost if a rank has ended.
        """
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.mesh, self.device = mesh, device
        self.held: TokenBatch | None = None  # the fields of a batch that every rank has
        self.failed = False  # on another rank: rank 0 has failed
        self._store, self._limit, self._check_alive = store, limit, check_alive
        self._processes = [store.get(process_key(i)).decode() for i in range(self.world_size)]
        self._calls = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self._count = 0  # calls so far
        self._in_call = self.rank > 0  # what it calls then is a part of the call
        self._announcing, self._ended = threading.Lock(), threading.Event()
        self._unheard: RuntimeError | None = None  # between two calls; the next one explains it
        if self.rank == 0:
            threading.Thread(target=self._announce_no_call, daemon=True).start()

    # --- calls ------------------------------------------------------------------------------------

    @contextmanager
    def everywhere(
        self, name: str, batch: TokenBatch | None = None, **arguments: Any
    ) -> Iterator[None]:
        """Let every other rank make the same call at the same time as rank 0.

        Raises TrainingError, which names the ranks that do not answer, if a collective fails.
        """
        if self._in_call:
            yield
            return
        with self._announcing:
            self._in_call = True
        try:
            if self._unheard is not None:
                raise self._unheard
            self._announce(Call(name, batch, arguments))
            yield
        except Exception as error:
            self._explain(error, self._failed_with(error, range(1, self.world_size)))
            raise
        finally:
            self._in_call = False

    def next_call(self) -> Call | None:
        """Wait for rank 0's next call. Return None if there is none: the run has ended.

        `failed` says how. Raises TrainingError if rank 0 stands still.
        """
        size = torch.full((1,), NO_CALL_YET, dtype=torch.int64, device="cpu")
        while size == NO_CALL_YET:
            self._receive(size, self._calls)
        data = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if size:
            self._receive(data)
        if not data.any():  # the run has ended, or rank 0 has
            self.failed = True
            with suppress(RuntimeError):  # the store has gone too
                self.failed = not self._store.check([ENDED_KEY])
            return None
        message = Message.decode(data.numpy().tobytes(), "rank 0")
        self._count += 1
        name, arguments = message.header["call"], message.header["arguments"]
        if "kept" in message.header:  # it has a batch
            self.held = batch_from_message(message, self.held)
            return Call(name, self.held, arguments)
        return Call(name, None, arguments)

    def _receive(self, tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Fill a tensor with the call that rank 0 announces; with 0 if rank 0 has gone.

        Raises TrainingError if rank 0 stands still.
        """
        began = time.monotonic()
        try:
            dist.broadcast(tensor, 0, group=group)
        except RuntimeError as error:
            if time.monotonic() - began >= self._limit:
                # not asked for in the store: that of Ray is in rank 0's process
                reason = "if it lives, it waits for another rank, which it names"
                raise self._lost([0], f"{reason}; {str(error).splitlines()[0]}") from error
            tensor.zero_()  # whoever started it says why

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Return a context for a call of rank 0 on another rank.

        An error that rank 0 has too is left to it. Raises TrainingError as `everywhere`.
        """
        try:
            yield
        except Exception as error:
            found = self._failed_with(error, [0])
            if not found:
                self._explain(error, found)
                raise

    def _announce(self, call: Call) -> None:
        self._count += 1
        message = Message({})
        if call.batch is not None:
            message = batch_message({}, call.batch, self.held)
            self.held = call.batch
        message.header.update(call=call.name, arguments=call.arguments)
        data = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        with self._announcing:
            self._announce_size(len(data))
        dist.broadcast(data, 0)

    def _announce_size(self, size: int) -> None:
        dist.broadcast(torch.tensor([size], device="cpu"), 0, group=self._calls)

    def _announce_no_call(self) -> None:
        """Let the others know that rank 0 lives, while it samples, evaluates or writes."""
        try:
            while not self._ended.wait(self._limit / ANNOUNCEMENTS):
                with self._announcing:
                    if not self._in_call and not self._ended.is_set():
                        self._announce_size(NO_CALL_YET)
        except RuntimeError as error:
            self._unheard = error

    # --- failures ---------------------------------------------------------------------------------

    def _failed_with(self, error: Exception, ranks: Sequence[int]) -> dict[int, str]:
        """Tell the others that this call has failed here, and wait until it has in all `ranks`.

        Returns the cause on each rank that it has failed on, "" where that is the failure of
        another.
        """
        deadline, found = time.monotonic() + GRACE_S, dict[int, str]()
        with suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(self._failure_key(self.rank), _cause(error))
            while len(found) < len(ranks):
                for rank in ranks:
                    cause = self._failure_of(rank)
                    if cause is not None:
                        found[rank] = cause
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        return found

    def _failure_of(self, rank: int) -> str | None:
        """Return the cause that a rank has told of this call, None if it has told none.

        Also of the one before, if that failed on a rank after rank 0 had left it.
        """
        keys, before = [self._failure_key(rank)], self._count - 1
        if self.rank == 0 and not self._store.check([self._failure_key(0, before)]):
            keys.append(self._failure_key(rank, before))
        for key in keys:
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None

    def _failure_key(self, rank: int, count: int | None = None) -> str:
        if count is None:
            count = self._count
        return f"failed/{count}/{rank}"

    def _explain(self, error: Exception, failed: dict[int, str]) -> None:
        """Raise TrainingError if a failed collective is the error.

        failed: cause on each other rank that the call has failed on.
        """
        if _cause(error):
            return
        reason = str(error).splitlines()[0]
        try:
            self._check_alive()
        except RankLost as lost:
            reason = str(lost)
        causes = [f"{self._name(rank)}: {cause}" for rank, cause in failed.items() if cause]
        if causes:
            raise self._stopped("; ".join(causes)) from error
        others = [0] if self.rank else range(1, self.world_size)
        missing = [rank for rank in others if rank not in failed]
        if missing:
            raise self._lost(missing, reason) from error
        raise self._stopped(reason) from error

    def _lost(self, missing: Sequence[int], reason: str) -> TrainingError:
        names = ", ".join(map(self._name, missing))
        return self._stopped(
            f"no answer from {names}, which has ended or stands still (train.rank_timeout is "
            f"{self._limit:g} s); {reason}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._processes[rank]})"

    def _stopped(self, reason: str) -> TrainingError:
        return TrainingError(
            f"the ranks cannot go on together: {reason}; `--resume` continues after the last "
            "checkpoint"
        )

    def end(self, *, failed: bool = False) -> None:
        """Leave the others. On rank 0: tell them that the run has ended, and whether it failed."""
        end = ENDED_KEY
        if failed:
            end = FAILED_KEY
        if self.rank == 0:
            self._ended.set()
            with suppress(RuntimeError):
                self._store.set(self._failure_key(0), "")
                self._store.set(end, "")
                held = self._announcing.acquire(timeout=GRACE_S)  # not if a rank takes nothing
                ended = torch.zeros(1, dtype=torch.int64, device="cpu")
                work = dist.broadcast(ended, 0, group=self._calls, async_op=True)
                if held:
                    self._announcing.release()
                work.wait(timedelta(seconds=GRACE_S))
        dist.destroy_process_group()

    # --- sums -------------------------------------------------------------------------------------

    def join_rows(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors on the CPU, each row of which one rank has set and the others left at 0.

        Exact for every dtype, because bytes are added.
        """
        for tensor in tensors.values():
            dist.all_reduce(tensor.view(torch.uint8))

    def gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return these tensors of every rank, on the CPU. Shapes and dtypes are the same on all.

        They travel as float64, which holds float32 and counts exactly.
        """
        flat = torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])
        found = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(found, flat)
        sizes = [tensor.numel() for tensor in tensors]
        return [_unflatten(of_rank.split(sizes), tensors) for of_rank in found]


def _cause(error: Exception) -> str:
    """Return an error in one line, "" for a failed collective: another rank has the cause."""
    if isinstance(error, dist.DistError) or any(each in str(error) for each in COLLECTIVE):
        return ""
    text = str(error).splitlines() or [""]
    if not isinstance(error, UsageError | TrainingError):
        text[0] = f"{type(error).__name__}: {text[0]}"
    return printable(text[0][:MAX_CAUSE_CHARS]) or type(error).__name__


def _unflatten(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts with the shapes and dtypes of `like`, on the CPU."""
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, like, strict=True)]
