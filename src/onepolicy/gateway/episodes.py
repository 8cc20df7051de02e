"""The episodes of a gateway, each found by its API key."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from typing import Any

from onepolicy.gateway.messages import RequestError
from onepolicy.gateway.session import Session

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
MOST_OPEN = 4096
MOST_ANSWERS = 4096
"""Episodes that ended last, whose answers are kept for who asks again."""


class Episodes:
    """Open episodes.

    A program's API key is its episode's name, a dot, and a code that only the gateway's secret can
    make. So a program speaks for its own episode alone, and cannot give itself a reward: who ends
    an episode shows the secret.
    """

    def __init__(self, begin: Callable[[str], Session], secret: str | None = None) -> None:
        """Store how an episode with a name begins. secret: None makes one."""
        self._begin = begin
        self.secret = secret or secrets.token_urlsafe(24)
        self._open: dict[str, Session] = {}
        self._ended: set[str] = set()
        self._answers: dict[str, tuple[float, dict[str, Any]]] = {}

    def key_of(self, name: str) -> str:
        """Return the API key of an episode. Raises RequestError for a name that cannot be one."""
        if not NAME.fullmatch(name):
            raise RequestError("episode: expected 1 to 128 letters, digits, - and _")
        code = hmac.new(self.secret.encode(), name.encode(), hashlib.sha256).hexdigest()
        return f"{name}.{code[:32]}"

    def check_secret(self, given: str) -> None:
        """Raise RequestError unless this is the gateway's secret."""
        if not secrets.compare_digest(given.encode(), self.secret.encode()):
            raise RequestError(
                "the API key is not the gateway's secret, which begins and ends episodes",
                status=401,
                code="invalid_api_key",
            )

    def find(self, key: str) -> Session:
        """Return the episode of a key, begun by its first request. Raises RequestError."""
        name = key.rpartition(".")[0]
        expected = ""
        if NAME.fullmatch(name):
            expected = self.key_of(name)
        if not expected or not secrets.compare_digest(key.encode(), expected.encode()):
            raise RequestError(
                "the API key is of no episode; POST /v1/episodes makes one",
                status=401,
                code="invalid_api_key",
            )
        if name in self._ended:
            raise RequestError(f"episode {name} has ended", status=403, code="episode_over")
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                raise RequestError(f"{MOST_OPEN} episodes are open; end some", status=429)
            self._open[name] = self._begin(name)
        return self._open[name]

    def to_end(self, name: str) -> Session:
        """Return an open episode that can be ended: none of its turns is being sampled.

        Raises RequestError otherwise.
        """
        if name in self._ended:
            raise RequestError(
                f"episode: {name!r} has ended; its line is in episodes.jsonl",
                status=403,
                code="episode_over",
            )
        if name not in self._open:
            raise RequestError(
                f"episode: {name!r} is not open; it begins with its first request", status=404
            )
        running = self._open[name].running
        if running:
            raise RequestError(
                f"episode: {running} turns of {name!r} are being sampled; end it after them",
                status=409,
                code="turns_run",
            )
        return self._open[name]

    def answer_to_end(self, name: str, reward: float) -> dict[str, Any] | None:
        """Return what was answered when the episode was ended with this reward, None if it was not.

        So who lost the answer asks again. Raises RequestError if it was ended with another one.
        """
        given, answer = self._answers.get(name, (reward, None))
        if given != reward:
            raise RequestError(
                f"reward: {reward:g} given, but {name!r} was ended with {given:g}",
                status=403,
                code="episode_over",
            )
        return answer

    def end(self, name: str, reward: float = 0.0, answer: dict[str, Any] | None = None) -> Session:
        """Close an open episode and return it. Its key serves nothing any more.

        answer: to who ends it with this reward, None: nobody asks again.
        """
        self._ended.add(name)
        if answer is not None:
            self._answers[name] = reward, answer
        while len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return self._open.pop(name)

    @property
    def names(self) -> list[str]:
        return list(self._open)
