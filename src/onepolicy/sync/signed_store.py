"""Signed JSON messages that the two ends of a weight update exchange through a store."""

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
from onepolicy.sync.messages import quote_error, validate_message

FAILED = "failed"  # name of the sender's error message; no other message follows it
POLL_S = 0.1
SIGNATURE_BYTES = 64  # SHA-256 in hexadecimal


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address and key with which a receiver joins a weight update."""

    host: str
    port: int
    key: str = field(repr=False)  # hex; whoever knows it may take part
    size: int  # receivers and the sender
    backend: str
    limit: float  # timeout of every wait [s]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Invitation:
        """Parse an encoded invitation. Raises TrainingError, without the key in its message."""
        try:
            invitation = validate_message(
                Invitation, json.loads(text), "weight sync: the invitation"
            )
            bytes.fromhex(invitation.key)
        except (ValueError, TypeError, RecursionError):
            raise TrainingError(
                "weight sync: the invitation is malformed: no JSON, or no key"
            ) from None
        return invitation


class SignedStore:
    """A store of named JSON messages, signed with a shared key.

    limit: timeout of every wait [s].
    """

    def __init__(self, store: dist.Store, key: bytes, limit: float) -> None:
        self.store = dist.PrefixStore("onepolicy", store)
        self._key, self._limit = key, limit

    def put_message(self, name: str, value: object) -> None:
        body = json.dumps(value).encode()
        self.store.set(name, (self._sign(name, body) + body).decode())

    def get_message(self, name: str) -> Any:
        """Wait for a message and return it.

        Raises TrainingError if the other side fails, is gone or is silent for too long, or if the
        message was not signed with this store's key.
        """
        if not self.wait_for_messages([name], self.raise_if_failed):
            raise TrainingError(
                f"weight sync: the other side is silent for {self._limit:g} s (waiting for {name})"
            )
        return self._read_message(name)

    def wait_for_messages(self, names: Sequence[str], on_poll: Callable[[], None]) -> bool:
        """Wait for all the messages; return whether they came in time.

        on_poll: called between two looks at the store, so that it can end the wait by raising.
        """
        end, pause = time.monotonic() + self._limit, POLL_S / 64
        while time.monotonic() < end:
            try:
                # Not store.wait: it logs a warning whenever a wait times out.
                if self.store.check(list(names)):
                    return True
            except RuntimeError as error:
                raise TrainingError(
                    f"weight sync: the other side is gone (waiting for {names[0]}): {error}"
                ) from None
            on_poll()
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return False

    def raise_if_failed(self) -> None:
        """Raise TrainingError if the other side has failed."""
        if self.store.check([FAILED]):
            problem = quote_error(self._read_message(FAILED))
            raise TrainingError(f"weight sync: the other side failed: {problem}")

    def _read_message(self, name: str) -> Any:
        data = self.store.get(name)
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._sign(name, body)):
            raise TrainingError(
                f"weight sync: the message {name} is not from this run; check which other "
                "processes can reach this network"
            )
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:  # the signature was right
            raise TrainingError(f"weight sync: the message {name} is malformed: {error}") from None

    def _sign(self, name: str, body: bytes) -> bytes:
        signed = name.encode() + b"\0" + body
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest().encode()
