"""What the two ends of a weight update tell each other: signed JSON in a store."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from onepolicy.config import TrainingError
from onepolicy.sync.messages import quoted, read_as

FAILED = "failed"  # the message that there will be no other, and why
POLL_S = 0.1
SIGNATURE_BYTES = 64  # of SHA-256 in hexadecimal


@dataclass(frozen=True, slots=True)
class Invitation:
    host: str
    port: int
    key: str = field(repr=False)  # hex; who has it may take part
    size: int  # receivers and the sender
    backend: str
    limit: float  # seconds of every wait

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """TrainingError, which does not repeat the key, for what is no invitation."""
        try:
            told = read_as(Invitation, json.loads(text), "weight sync: the invitation")
            bytes.fromhex(told.key)
        except (ValueError, TypeError, RecursionError):
            raise TrainingError(
                "weight sync: the invitation is malformed: no JSON, or no key"
            ) from None
        return told


class Board:
    """The store as signed JSON under names. limit: seconds of every wait."""

    def __init__(self, store: dist.Store, key: bytes, limit: float) -> None:
        self.store, self._key, self._limit = dist.PrefixStore("onepolicy", store), key, limit

    def put(self, name: str, value: object) -> None:
        body = json.dumps(value).encode()
        self.store.set(name, (self._sign(name, body) + body).decode())

    def get(self, name: str) -> Any:
        """Waits for it. TrainingError if the other side fails or is gone, or if who wrote it has not our key."""
        if not self.wait([name], self._refuse_failed):
            raise TrainingError(
                f"weight sync: the other side is silent for {self._limit:g} s (waiting for {name})"
            )
        return self._read(name)

    def wait(self, names: Sequence[str], meanwhile: Callable[[], None]) -> bool:
        """Whether all come within the limit. `meanwhile` is called now and then."""
        end, pause = time.monotonic() + self._limit, POLL_S / 64
        while time.monotonic() < end:
            try:
                if self.store.check(
                    list(names)
                ):  # store.wait writes a warning for every wait that ends in vain
                    return True
            except RuntimeError as error:
                raise TrainingError(
                    f"weight sync: the other side is gone (waiting for {names[0]}): {error}"
                ) from None
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return False

    def _refuse_failed(self) -> None:
        if self.store.check([FAILED]):
            raise TrainingError(f"weight sync: the other side failed: {quoted(self._read(FAILED))}")

    def _read(self, name: str) -> Any:
        data = self.store.get(name)
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(name, body)):
            raise TrainingError(
                f"weight sync: the message {name} is not from this run; who else is on this network?"
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:  # of who has the key
            raise TrainingError(f"weight sync: the message {name} is malformed: {error}") from None

    def _sign(self, name: str, body: bytes) -> bytes:
        return (
            hmac.new(self._key, name.encode() + b"\0" + body, hashlib.sha256).hexdigest().encode()
        )
