"""Broadcast of weights from one process to others: in buckets, checked by tensor, without pickle.

One `Sender`, in the driver, makes one update of a fixed number of `Receiver`s, each in the process
of an engine. A process group made for the update broadcasts the tensors. Its store holds their
names, shapes and checksums and the acknowledgements, as JSON signed with the invitation's key. A
process that reaches the store without the key can break an update but cannot alter it. The
invitation is a secret: send it over an authenticated channel.

    driver                                         engine's process
    with Sender(receivers=2) as sender:
        ... sender.invitation, rank 1 and 2 ...    with Receiver(invitation, rank, version=7) as w:
        sender.send(learner.named_weights(), 7)        await engine.load_weights(w, 7)

Either side needs memory for two buckets beside the weights: the sender gathers and sums the next
one while one is sent, and a receiver sums and loads one while the next arrives.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import ConfigDict, NonNegativeInt
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.models.checksum import ChecksumAccumulator, ChecksumTable, describe_difference
from onepolicy.sync.buckets import (
    bucket_offsets,
    flatten_tensors,
    meta_tensors,
    split_into_buckets,
    unflatten_bucket,
)
from onepolicy.sync.group import (
    join_store,
    local_address,
    make_process_group,
    open_connections,
    open_store,
    start_broadcast,
    start_in_daemon_thread,
    wait_for_broadcast,
)
from onepolicy.sync.messages import quote_error, validate_message
from onepolicy.sync.signed_store import FAILED, POLL_S, Invitation, SignedStore

BUCKET_BYTES = 2**26  # over gloo; a larger tensor is a bucket of its own, which is not copied
NCCL_BUCKET_BYTES = 2**30  # the same over NCCL, whose speed grows with the size of a message

ALL_JOINED = "all here"  # name of the sender's message that the group can be made
CONNECT = "connect"  # name of the sender's message that NCCL's ranks are to connect now
CONNECTED = "connected"  # with /RANK: name of a receiver's message that it has gloo's group
GIVEN_UP = "weight sync: given up, because a receiver will not come"


class BucketHeader(TypedDict):
    """The sender's description of a bucket. tensors: name -> (dtype, shape, checksum)."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    version: int
    tensors: dict[str, tuple[str, tuple[NonNegativeInt, ...], int]]


class EndHeader(TypedDict):
    """The sender's last message, which every receiver repeats. end: number of buckets."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    version: int
    end: int


class ReceiverLost(TrainingError):
    """The error of a sender whose receiver failed, is gone or is silent."""


class UpdateCancelled(ReceiverLost):
    """The error of a sender that was cancelled because a receiver will not come."""


class Sender:
    """The sending end of one update. Call `send` once."""

    def __init__(
        self,
        *,
        receivers: int,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 600.0,
        bucket_bytes: int | None = None,
    ) -> None:
        """Open the update's store.

        host: this machine's address for the receivers. backend: gloo, or nccl for tensors on GPUs.
        bucket_bytes: size of a bucket; None: that of the backend.
        """
        store = open_store(host, timeout_s)
        key = secrets.token_bytes(32)
        self.settings = Invitation(host, store.port, key.hex(), 1 + receivers, backend, timeout_s)
        self.invitation = self.settings.encode()
        self._store = store
        self._messages = SignedStore(store, key, timeout_s)
        self._checksums = ChecksumAccumulator(key)
        self._group: Any = None
        self._in_flight: tuple[Any, Tensor] | None = None  # broadcast and its bytes
        usual = {"gloo": BUCKET_BYTES, "nccl": NCCL_BUCKET_BYTES}
        self._bucket_bytes = bucket_bytes or usual[backend]
        self._ranks = range(1, 1 + receivers)
        self._cancelled = threading.Event()

    def send(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all tensors to all receivers and wait until every receiver has loaded them.

        Blocks: run it in a thread beside an event loop. Raises TrainingError if a receiver does not
        come, fails, is silent for too long or has other bytes. The receivers' engines then hold no
        version.
        """
        try:
            self._group = self._make_group()
            end = self._send_buckets(named_weights, version)
            for rank in self._ranks:
                self._check_acknowledged(rank, end)
        except BaseException as error:
            self._messages.put_message(FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._in_flight = self._group = None  # closes its connections

    def cancel(self) -> None:
        """End `send` soon, from another thread, because a receiver is known not to come."""
        self._cancelled.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _make_group(self) -> Any:
        self._wait_for_receivers([f"here/{rank}" for rank in self._ranks], "to join")
        self._messages.put_message(ALL_JOINED, True)
        settings = self.settings
        try:
            group = _make_group(settings, 0, settings.host, self._raise_if_cancelled)
        except RuntimeError as error:
            self._raise_if_failed()
            raise ReceiverLost(
                f"weight sync: the group of {settings.size} processes could not be made: {error}"
            ) from None
        if settings.backend == "gloo":
            # This end can have its connections while receivers still make theirs to each other.
            # Such a receiver takes no bytes, and a broadcast to it would wait for the time limit.
            names = [f"{CONNECTED}/{rank}" for rank in self._ranks]
            self._wait_for_receivers(names, "to connect")
        return group

    def _send_buckets(
        self, named_weights: Iterable[tuple[str, Tensor]], version: int
    ) -> dict[str, Any]:
        """Send every bucket, gathered while the last is sent, and return the final message."""
        buckets = 0
        for bucket in split_into_buckets(named_weights, self._bucket_bytes):
            self._raise_if_failed()
            if not buckets:
                self._connect(next(iter(bucket.values())).device)
            flat, sums = self._prepare(bucket)
            self._finish_broadcast()
            self._start_broadcast(buckets, flat, {"version": version, "tensors": sums})
            buckets += 1
        self._finish_broadcast()
        end = {"version": version, "end": buckets}
        self._messages.put_message(f"bucket/{buckets}", end)
        return end

    def _connect(self, device: torch.device) -> None:
        """Connect NCCL's ranks. gloo connected them when the group was made."""
        if self.settings.backend == "gloo":
            return
        self._messages.put_message(CONNECT, True)
        settings, store = self.settings, self._messages.store
        try:
            open_connections(self._group, device, settings.limit)
        except RuntimeError as error:
            self._raise_if_failed()
            silent = [rank for rank in self._ranks if not store.check([f"{CONNECT}/{rank}"])]
            who = "each receiver tried"
            if silent:
                who = f"receiver {silent[0]} did not try"
            raise ReceiverLost(
                f"weight sync: {settings.backend} could not connect the {settings.size} processes "
                f"({who}): {error}"
            ) from None

    def _prepare(self, bucket: dict[str, Tensor]) -> tuple[Tensor, ChecksumTable]:
        """Return the bucket's bytes, [size] uint8, and the checksums of its tensors."""
        for name, tensor in bucket.items():
            self._checksums.add(name, tensor)
        sums = self._checksums.pop_all()
        flat = flatten_tensors(list(bucket.values()), cpu=self.settings.backend == "gloo")
        return flat, sums

    def _start_broadcast(self, number: int, flat: Tensor, header: dict[str, Any]) -> None:
        self._in_flight = start_broadcast(self._group, flat), flat
        # The header follows the start of the broadcast, because a receiver that has read the header
        # waits for bytes and no longer for messages.
        self._messages.put_message(f"bucket/{number}", header)

    def _finish_broadcast(self) -> None:
        """Wait until the bucket that is being sent has arrived."""
        if self._in_flight is None:
            return
        work, flat = self._in_flight
        self._in_flight = None
        try:
            wait_for_broadcast(work, flat.device, self.settings.limit)
            return
        except RuntimeError as error:
            problem = str(error)
        # Raised outside the except block and without `work`: an error that refers to it would keep
        # the connections open, and other receivers wait until they close.
        del work
        self._raise_if_failed()
        raise ReceiverLost(f"weight sync: a receiver is gone or too slow: {problem}")

    def _check_acknowledged(self, rank: int, end: dict[str, Any]) -> None:
        self._wait_for_receivers([f"done/{rank}"], "to load the weights")
        answer = self._messages.get_message(f"done/{rank}")
        if answer != end:
            raise ReceiverLost(f"weight sync: receiver {rank} {_describe_answer(answer)}")

    def _raise_if_failed(self) -> None:
        """Raise ReceiverLost if a receiver has ended, which none does before the last message."""
        for rank in self._ranks:
            if self._messages.store.check([f"done/{rank}"]):
                answer = self._messages.get_message(f"done/{rank}")
                raise ReceiverLost(f"weight sync: receiver {rank} {_describe_answer(answer)}")
        self._raise_if_cancelled()

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise UpdateCancelled(GIVEN_UP)

    def _wait_for_receivers(self, names: Sequence[str], purpose: str) -> None:
        if not self._messages.wait_for_messages(names, self._raise_if_cancelled):
            missing = next(name for name in names if not self._messages.store.check([name]))
            raise ReceiverLost(
                f"weight sync: receiver {missing.split('/')[1]} took more than "
                f"{self.settings.limit:g} s {purpose}"
            )


class Receiver:
    """The receiving end of one update: a context manager and an iterator over (name, tensor).

    Pass it to an engine's load_weights. The tensors are on `device` and belong to the engine. At
    the end of the `with` block the receiver reports to the sender whether the engine took all
    tensors without an error. Any step raises TrainingError if bytes, names or the version are not
    the sender's, or if the sender fails or is silent. The engine then holds no complete set of
    weights.
    """

    def __init__(
        self, invitation: str, rank: int, *, version: int, device: torch.device | str = "cpu"
    ) -> None:
        """Read the invitation; `__enter__` joins.

        rank: from 1 to the sender's number of receivers, each used once. version: the version that
        the caller expects.
        """
        self._settings, self._rank, self._version = Invitation.decode(invitation), rank, version
        self._device = torch.device(device)
        self._key = bytes.fromhex(self._settings.key)
        self._end: dict[str, Any] | None = None  # the sender's last message
        self._group: Any = None
        self._in_flight: tuple[Any, Tensor] | None = None  # broadcast and its bytes to come
        self._tensors = self._iterate_tensors()

    def __enter__(self) -> Self:
        settings = self._settings
        try:
            store = join_store(settings.host, settings.port, settings.limit)
            self._messages = SignedStore(store, self._key, settings.limit)
            self._messages.put_message(f"here/{self._rank}", True)
            # Joining the group blocks, so first wait until every receiver has come.
            self._messages.get_message(ALL_JOINED)
            host = local_address(settings.host, settings.port)
            self._group = _make_group(settings, self._rank, host, self._messages.raise_if_failed)
            if settings.backend == "gloo":
                self._messages.put_message(f"{CONNECTED}/{self._rank}", True)
            else:
                self._messages.get_message(CONNECT)
                self._messages.put_message(f"{CONNECT}/{self._rank}", True)
                open_connections(self._group, self._device, settings.limit)
        except (RuntimeError, OSError) as error:
            raise TrainingError(
                f"weight sync: cannot join the sender of the weights at {settings.host}:"
                f"{settings.port}: {error}"
            ) from None
        return self

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._end is not None:
            self._messages.put_message(f"done/{self._rank}", self._end)
            self._group = None
            return
        problem = "did not take all tensors"
        if error is not None:
            problem = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the sender is gone, which caused the error
            self._messages.put_message(f"done/{self._rank}", {FAILED: problem})
        self._in_flight = self._group = (
            None  # closes its connections, which ends the waits of other processes
        )
        if error is None:
            raise TrainingError(f"weight sync: the engine {problem}")

    def _iterate_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the checked tensors of every bucket, then check the last message."""
        number, checksums = 0, ChecksumAccumulator(self._key)
        header = self._read_header(number)
        self._start_receiving(header)
        while "end" not in header:
            sent, bucket = header["tensors"], self._finish_receiving(header)
            number += 1
            header = self._read_header(number)
            self._start_receiving(header)  # it arrives while this bucket is summed and loaded
            for name, tensor in bucket.items():
                checksums.add(name, tensor)
            sums = checksums.pop_all()
            problem = describe_difference(sent, sums)
            if problem is not None:
                raise TrainingError(f"weight sync of version {self._version}: {problem}")
            yield from bucket.items()
        end = {"version": self._version, "end": number}
        if header != end:
            raise TrainingError(
                f"weight sync of version {self._version}: the sender counts {header['end']} "
                f"buckets, and {number} came"
            )
        self._end = end

    def _read_header(self, number: int) -> dict[str, Any]:
        header: dict[str, Any] = self._messages.get_message(f"bucket/{number}")
        name = f"weight sync: the message bucket/{number}"
        validate_message(BucketHeader | EndHeader, header, name)
        if header["version"] != self._version:
            raise TrainingError(
                f"weight sync: weights of version {header['version']} came instead of version "
                f"{self._version}"
            )
        return header

    def _start_receiving(self, header: dict[str, Any]) -> None:
        """Start to receive the bucket of this header. Do nothing for the last message."""
        if "end" in header:
            return
        _, size = bucket_offsets(list(meta_tensors(header["tensors"]).values()))
        device = self._device
        if self._settings.backend == "gloo":
            device = torch.device("cpu")
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        try:
            self._in_flight = start_broadcast(self._group, flat), flat
        except RuntimeError as error:
            raise _sender_lost(error) from None

    def _finish_receiving(self, header: dict[str, Any]) -> dict[str, Tensor]:
        """Wait for the bucket that arrives, and return its tensors."""
        assert self._in_flight is not None
        work, flat = self._in_flight
        self._in_flight = None
        try:
            wait_for_broadcast(work, flat.device, self._settings.limit)
        except RuntimeError as error:
            raise _sender_lost(error) from None
        return unflatten_bucket(flat.to(self._device), meta_tensors(header["tensors"]))


def _make_group(
    settings: Invitation, rank: int, host: str, raise_if_given_up: Callable[[], None]
) -> Any:
    """Make the update's group as `rank`. host: this machine's address for the other ranks.

    gloo connects every two ranks here. It waits for one that is gone until the time limit. So a
    thread makes the group, and stays behind when raise_if_given_up raises.
    """
    # A connection of its own: a store's waiting call blocks all others of the same connection.
    store = join_store(settings.host, settings.port, settings.limit)
    make = partial(
        make_process_group,
        dist.PrefixStore("group", store),
        rank,
        settings.size,
        backend=settings.backend,
        host=host,
        limit=settings.limit,
    )
    if settings.backend != "gloo":
        return make()
    making = start_in_daemon_thread(make)
    while not wait([making], timeout=POLL_S).done:
        raise_if_given_up()
    return making.result()


def _sender_lost(error: RuntimeError) -> TrainingError:
    return TrainingError(f"weight sync: the sender is gone or too slow: {error}")


def _describe_answer(answer: Any) -> str:
    if isinstance(answer, dict) and FAILED in answer:
        return f"failed: {quote_error(answer[FAILED])}"
    validate_message(EndHeader, answer, "weight sync: a receiver's answer")
    return f"has version {answer['version']} in {answer['end']} buckets, which is not what was sent"
