"""Weights from one process to others: streamed in buckets, checked tensor by tensor, nothing pickled.

One `Sender`, in the driver, is one update to a fixed number of `Receiver`s, each in the process of an engine. Tensors
travel by broadcast in a process group made for the update; names, shapes, checksums and acknowledgements are JSON in
its store, signed with the invitation's key, so that who reaches the store without the invitation can break an update
but not alter it. The invitation is a secret: hand it over a channel that knows who is at its other end.

    driver                                                engine's process
    with Sender(receivers=2) as sender:
        ... sender.invitation, rank 1 and 2 ...           with Receiver(invitation, rank, version=7) as weights:
        sender.send(learner.named_weights(), 7)               await engine.load_weights(weights, 7)

Memory beside the weights: a bucket on each side.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from pydantic import ConfigDict, NonNegativeInt
from torch import Tensor
from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.sync.board import FAILED, Board, Invitation
from onepolicy.sync.checksum import Checksums, Sums, difference
from onepolicy.sync.group import (
    finish,
    join_store,
    open_store,
    own_address,
    process_group,
    start_broadcast,
)
from onepolicy.sync.messages import quoted, read_as

ALIGN = 16  # every dtype may start at such a byte


def in_buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """In their order, a bucket as full as `most` bytes allow; a larger tensor is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if name in bucket or (bucket and size + tensor.nbytes > most):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach()
        size += tensor.nbytes
    if bucket:
        yield bucket


def likes(sums: Sums) -> dict[str, Tensor]:
    """Tensors of these names, dtypes and shapes without bytes. TrainingError for what no tensor can be."""
    found: dict[str, Tensor] = {}
    for name, (dtype, shape, _) in sums.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise TrainingError(
                f"weight sync: {name!r} is to have dtype {dtype[:40]!r}, which is none"
            )
        try:
            found[name] = torch.empty(shape, dtype=kind, device="meta")
        except (RuntimeError, TypeError, OverflowError) as error:
            raise TrainingError(
                f"weight sync: {name!r} is to have a shape that none has: {error}"
            ) from None
    return found


def split(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of a bucket's bytes."""
    starts, _ = places(list(like.values()))
    return {
        name: flat[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, (name, t) in zip(starts, like.items(), strict=True)
    }


def places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each starts in a bucket, and the bucket's size [bytes]."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(-(-end // ALIGN) * ALIGN)
        end = starts[-1] + tensor.nbytes
    return starts, end


def flattened(tensors: Sequence[Tensor], *, cpu: bool) -> Tensor:
    """All their bytes, [size] uint8; a view of a tensor that is alone."""
    data = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len(data) == 1:
        return data[0].cpu() if cpu else data[0]
    starts, size = places(tensors)
    flat = torch.empty(size, dtype=torch.uint8, device="cpu" if cpu else data[0].device)
    for start, part in zip(starts, data, strict=True):
        flat[start : start + part.numel()] = part
    return flat


BUCKET_BYTES = 2**26
"""Small tensors share a bucket; a larger one is a bucket of its own and is not copied by the sender."""

ALL_HERE = "all here"  # the sender's message that the group can be made


class Bucket(TypedDict):
    """What the sender says of a bucket."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    version: int
    tensors: dict[str, tuple[str, tuple[NonNegativeInt, ...], int]]


class End(TypedDict):
    """The sender's last word, which every receiver repeats."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    version: int
    digest: str
    end: int


class GivenUp(TrainingError):
    """The sender was told that a receiver will not come."""


class Sender:
    """One update. `send` once."""

    def __init__(
        self,
        *,
        receivers: int,
        backend: str = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 600.0,
        key: bytes | None = None,
    ) -> None:
        """host: this machine's address for the receivers. backend: gloo, or nccl for tensors on GPUs. key: a secret one
        that checksums of these weights were made with; None: one is made."""
        store = open_store(host, timeout_s)
        key = secrets.token_bytes(32) if key is None else key
        self.secret = Invitation(host, store.port, key.hex(), 1 + receivers, backend, timeout_s)
        self.invitation = self.secret.encode()
        self._store, self._board, self._checksums = (
            store,
            Board(store, key, timeout_s),
            Checksums(key),
        )
        self._known: Sums | None = None
        self._group: Any = None
        self._ranks = range(1, 1 + receivers)
        self._given_up = threading.Event()

    def send(
        self, weights: Iterable[tuple[str, Tensor]], version: int, known: Sums | None = None
    ) -> str:
        """All tensors to all receivers; waits until every one has loaded them. The digest that both sides agree on.

        known: what their checksums with this sender's key must be. Blocks: give it a thread of its own beside an event
        loop. TrainingError if the weights are other ones, or a receiver does not come, fails, is silent for too long,
        or has other bytes. After that the receivers' engines hold no version.
        """
        buckets, digest, missing = 0, hashlib.sha256(), set(known or ())
        self._known = known
        try:
            self._group = self._gathered()
            for bucket in in_buckets(weights, BUCKET_BYTES):
                self._refuse_failed()
                digest.update(self._send_bucket(buckets, bucket, version))
                buckets += 1
                missing -= bucket.keys()
            if missing:
                raise TrainingError(
                    f"weight sync of version {version}: {min(missing)!r} is not among what is to be sent"
                )
            end = {"version": version, "digest": digest.hexdigest(), "end": buckets}
            self._board.put(f"bucket/{buckets}", end)
            for rank in self._ranks:
                self._acknowledged(rank, end)
        except BaseException as error:
            self._board.put(FAILED, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._group = None  # closes its connections
        return digest.hexdigest()

    def give_up(self) -> None:
        """From another thread: `send` ends soon, because a receiver is known not to come."""
        self._given_up.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def _gathered(self) -> Any:
        names = [f"here/{rank}" for rank in self._ranks]
        self._wait(names, "to join")
        self._board.put(ALL_HERE, True)
        secret = self.secret
        try:
            return process_group(
                dist.PrefixStore("group", self._store),
                0,
                secret.size,
                backend=secret.backend,
                host=secret.host,
                limit=secret.limit,
            )
        except RuntimeError as error:
            self._refuse_failed()
            raise TrainingError(
                f"weight sync: the group of {secret.size} processes could not be made: {error}"
            ) from None

    def _send_bucket(self, number: int, bucket: dict[str, Tensor], version: int) -> bytes:
        for name, tensor in bucket.items():
            self._checksums.add(name, tensor)
        sums = self._checksums.take()
        if self._known is not None:
            problem = difference(
                {name: self._known[name] for name in self._known.keys() & sums.keys()}, sums
            )
            if problem is not None:
                raise TrainingError(
                    f"weight sync of version {version}: what is to be sent has changed: {problem}"
                )
        flat = flattened(list(bucket.values()), cpu=self.secret.backend == "gloo")
        work = start_broadcast(self._group, flat)
        # only now: a receiver that waits for bytes cannot be told that there will be none
        self._board.put(f"bucket/{number}", {"version": version, "tensors": sums})
        try:
            finish(work, flat.device)
            return json.dumps(sums).encode()
        except RuntimeError as error:
            problem = str(error)
        # An error that held `work`, in its frames or its context, would keep the connections open that others wait for.
        del work
        self._refuse_failed()
        raise TrainingError(f"weight sync: a receiver is gone or too slow: {problem}")

    def _acknowledged(self, rank: int, end: dict[str, object]) -> None:
        self._wait([f"done/{rank}"], "to load what it was sent")
        if (answer := self._board.get(f"done/{rank}")) != end:
            raise TrainingError(f"weight sync: receiver {rank} {_told(answer)}")

    def _refuse_failed(self) -> None:
        for rank in self._ranks:
            if self._board.store.check([f"done/{rank}"]):
                raise TrainingError(
                    f"weight sync: receiver {rank} {_told(self._board.get(f'done/{rank}'))}"
                )

    def _wait(self, names: Sequence[str], what: str) -> None:
        def given_up() -> None:
            if self._given_up.is_set():
                raise GivenUp("weight sync: given up, because a receiver will not come")

        if not self._board.wait(names, given_up):
            missing = next(name for name in names if not self._board.store.check([name]))
            raise TrainingError(
                f"weight sync: receiver {missing.split('/')[1]} took more than {self.secret.limit:g} s {what}"
            )


class Receiver:
    """An iterator over (name, tensor), for an engine's load_weights, inside a `with`.

    The tensors lie on `device` and belong to the engine. Leaving the `with` tells the sender whether all of them were
    taken without an error. TrainingError, from whatever step finds it, for bytes, names or a version that are not the
    sender's, or if the sender fails or is silent; whoever took the tensors then holds no complete set.
    """

    def __init__(
        self, invitation: str, rank: int, *, version: int, device: torch.device | str = "cpu"
    ) -> None:
        """rank: 1 to the sender's number of receivers, each once. version: that the caller was promised."""
        self._secret, self._rank, self._version = Invitation.decode(invitation), rank, version
        self._device = torch.device(device)
        self._key = bytes.fromhex(self._secret.key)
        self._digest = hashlib.sha256()
        self._end: dict[str, object] | None = None  # the sender's last word
        self._group: Any = None
        self._tensors = self._stream()

    def __enter__(self) -> Self:
        secret = self._secret
        try:
            store = join_store(secret.host, secret.port, secret.limit)
            self._board = Board(store, self._key, secret.limit)
            self._board.put(f"here/{self._rank}", True)
            self._board.get(
                ALL_HERE
            )  # who waits in the group cannot be told that somebody will not come
            self._group = process_group(
                dist.PrefixStore("group", store),
                self._rank,
                secret.size,
                backend=secret.backend,
                host=own_address(secret.host, secret.port),
                limit=secret.limit,
            )
        except (RuntimeError, OSError) as error:
            raise TrainingError(
                f"weight sync: {secret.host}:{secret.port}, where the weights come from, cannot be joined: {error}"
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
            self._board.put(f"done/{self._rank}", self._end)
            self._group = None
            return
        problem = (
            f"{type(error).__name__}: {error}" if error is not None else "did not take all tensors"
        )
        with suppress(RuntimeError):  # the sender is gone: that is what went wrong
            self._board.put(f"done/{self._rank}", {FAILED: problem})
        self._group = None  # closes its connections, which ends whoever waits for us
        if error is None:
            raise TrainingError(f"weight sync: the engine {problem}")

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        number, checksums = 0, Checksums(self._key)
        while "end" not in (header := self._header(number)):
            bucket = self._receive(header["tensors"])
            for name, tensor in bucket.items():
                checksums.add(name, tensor)
            sums = checksums.take()
            if (problem := difference(header["tensors"], sums)) is not None:
                raise TrainingError(f"weight sync of version {self._version}: {problem}")
            self._digest.update(json.dumps(sums).encode())
            number += 1
            yield from bucket.items()
        ours = {"version": self._version, "digest": self._digest.hexdigest(), "end": number}
        if header != ours:
            raise TrainingError(
                f"weight sync of version {self._version}: the sum of all tensors is not the sender's"
            )
        self._end = ours

    def _header(self, number: int) -> dict[str, Any]:
        header: dict[str, Any] = self._board.get(f"bucket/{number}")
        read_as(Bucket | End, header, f"weight sync: the message bucket/{number}")
        if header["version"] != self._version:
            raise TrainingError(
                f"weight sync: weights of version {header['version']} came instead of version {self._version}"
            )
        return header

    def _receive(self, sent: Sums) -> dict[str, Tensor]:
        like = likes(sent)
        _, size = places(list(like.values()))
        flat = torch.empty(
            size,
            dtype=torch.uint8,
            device="cpu" if self._secret.backend == "gloo" else self._device,
        )
        try:
            finish(start_broadcast(self._group, flat), flat.device)
        except RuntimeError as error:
            raise TrainingError(f"weight sync: the sender is gone or too slow: {error}") from None
        return split(flat.to(self._device), like)


def _told(answer: Any) -> str:
    if isinstance(answer, dict) and FAILED in answer:
        return f"failed: {quoted(answer[FAILED])}"
    read_as(End, answer, "weight sync: a receiver's answer")
    return f"has version {answer['version']} with checksum {answer['digest'][:12]}, which is not what was sent"
