"""The ranks of a run, as each of them sees the others.

Rank 0 samples and holds the log. Whatever takes all ranks it announces to them with its batch, and
all make the same call (`Ranks.everywhere`). The agent that started the ranks ends all of them when
one dies. A rank that stands still is noticed by the time limit of the process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onepolicy.config import TrainingError
from onepolicy.train.sharded.wire import Message, batch_from_message, batch_message
from onepolicy.types import TokenBatch

GRACE_S = 3.0
"""Seconds until a failure is reported: whoever started the ranks knows a death first."""
POLL_S = 0.05
ENDED_KEY = "ended"  # in the ranks' store: rank 0 has ended without an error
UNLIMITED = timedelta(days=365)
"""Timeout of the wait for rank 0's next call. It ends when rank 0 does."""


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
        timeout = UNLIMITED if self.rank else timedelta(seconds=limit)
        self._calls = dist.new_group(backend="gloo", timeout=timeout)
        self._count = 0  # calls so far
        self._in_call = self.rank > 0  # what it calls then is a part of the call

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
        self._in_call = True
        try:
            self._announce(Call(name, batch, arguments))
            yield
        except Exception as error:
            self._explain(error, self._unaffected(range(1, self.world_size)))
            raise
        finally:
            self._in_call = False

    def next_call(self) -> Call | None:
        """Wait for rank 0's next call. Return None if there is none: the run has ended.

        `failed` says how.
        """
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        with suppress(RuntimeError):  # rank 0 has gone; whoever started it says why
            dist.broadcast(size, 0, group=self._calls)
        if not size:
            self.failed = True
            with suppress(RuntimeError):  # the store has gone too
                self.failed = not self._store.check([ENDED_KEY])
            return None
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, 0)
        message = Message.decode(data.numpy().tobytes(), "rank 0")
        self._count += 1
        name, arguments = message.header["call"], message.header["arguments"]
        if "kept" in message.header:  # it has a batch
            self.held = batch_from_message(message, self.held)
            return Call(name, self.held, arguments)
        return Call(name, None, arguments)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Return a context for a call of rank 0 on another rank.

        An error that rank 0 has too is left to it. Raises TrainingError as `everywhere`.
        """
        try:
            yield
        except Exception as error:
            missing = self._unaffected([0])
            if missing:
                self._explain(error, missing)
                raise

    def _announce(self, call: Call) -> None:
        self._count += 1
        message = Message({})
        if call.batch is not None:
            message = batch_message({}, call.batch, self.held)
            self.held = call.batch
        message.header.update(call=call.name, arguments=call.arguments)
        data = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)], device="cpu"), 0, group=self._calls)
        dist.broadcast(data, 0)

    # --- failures ---------------------------------------------------------------------------------

    def _unaffected(self, ranks: Sequence[int]) -> list[int]:
        """Tell the others that this call has failed here. Return those of `ranks` that do not."""
        deadline = time.monotonic() + GRACE_S
        left = list(ranks)
        with suppress(RuntimeError):  # the store has gone with rank 0
            self._store.set(self._failure_key(self.rank), "")
            while left:
                left = [each for each in left if not self._store.check([self._failure_key(each)])]
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        return left

    def _failure_key(self, rank: int) -> str:
        return f"failed/{self._count}/{rank}"

    def _explain(self, error: Exception, missing: list[int]) -> None:
        """Raise TrainingError if a failed collective is the error. missing: ranks without it."""
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            return
        reason = str(error).splitlines()[0]
        try:
            self._check_alive()
        except RankLost as lost:
            reason = str(lost)
        names = ", ".join(
            f"rank {rank} ({self._store.get(process_key(rank)).decode()})" for rank in missing
        )
        if names:
            reason = (
                f"no answer from {names}, which has ended or stands still (train.rank_timeout is "
                f"{self._limit:g} s); {reason}"
            )
        raise TrainingError(
            f"the ranks cannot go on together: {reason}; `--resume` continues after the last "
            "checkpoint"
        ) from error

    def end(self, *, failed: bool = False) -> None:
        """Leave the others. On rank 0: tell them that the run has ended, and whether it failed."""
        if self.rank == 0:
            with suppress(RuntimeError):
                self._store.set(self._failure_key(0), "")
                if not failed:
                    self._store.set(ENDED_KEY, "")
                ended = torch.zeros(1, dtype=torch.int64, device="cpu")
                work = dist.broadcast(ended, 0, group=self._calls, async_op=True)
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


def _unflatten(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts with the shapes and dtypes of `like`, on the CPU."""
    return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, like, strict=True)]
