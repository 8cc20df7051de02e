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

FAILED = "failed"  # the message that there will be no other, and why
POLL_S = 0.1


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
        return cls(**json.loads(text))


class Board:
    """The store as signed JSON under names. limit: seconds of every wait."""

    def __init__(self, store: dist.Store, key: bytes, limit: float) -> None:
        self.store, self._key, self._limit = dist.PrefixStore("onepolicy", store), key, limit

    def put(self, name: str, value: object) -> None:
        body = json.dumps(value)
        self.store.set(name, self._sign(name, body) + body)

    def get(self, name: str) -> Any:
        """Waits for it. TrainingError if the other side fails or is gone, or if who wrote it has not our key."""
        if not self.wait([name], self._refuse_failed):
            raise TrainingError(f"weight sync: the other side is silent for {self._limit:g} s (waiting for {name})")
        return self._read(name)

    def wait(self, names: Sequence[str], meanwhile: Callable[[], None]) -> bool:
        """Whether all come within the limit. `meanwhile` is called now and then."""
        end, pause = time.monotonic() + self._limit, POLL_S / 64
        while time.monotonic() < end:
            try:
                if self.store.check(list(names)):  # store.wait writes a warning for every wait that ends in vain
                    return True
            except RuntimeError as error:
                raise TrainingError(f"weight sync: the other side is gone (waiting for {names[0]}): {error}") from None
            meanwhile()
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return False

    def _refuse_failed(self) -> None:
        if self.store.check([FAILED]):
            raise TrainingError(f"weight sync: the other side failed: {self._read(FAILED)}")

    def _read(self, name: str) -> Any:
        data = self.store.get(name).decode()
        if not hmac.compare_digest(data[:64].encode(), self._sign(name, data[64:]).encode()):
            raise TrainingError(f"weight sync: the message {name} is not from this run; who else is on this network?")
        return json.loads(data[64:])

    def _sign(self, name: str, body: str) -> str:
        return hmac.new(self._key, f"{name}\0{body}".encode(), hashlib.sha256).hexdigest()
