"""The episodes of a gateway, each found by its API key."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

from onepolicy.gateway.messages import RequestError
from onepolicy.gateway.session import Session

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
MOST_OPEN = 4096


class Episodes:
    """Open episodes. A program's API key is the gateway's secret, a dot, and its episode's name."""

    def __init__(self, begin: Callable[[str], Session], secret: str | None = None) -> None:
        """Store how an episode with a name begins. secret: None makes one."""
        self._begin = begin
        self.secret = secret or secrets.token_urlsafe(24)
        self._open: dict[str, Session] = {}
        self._ended: set[str] = set()

    def key_of(self, name: str) -> str:
        """Return the API key of an episode."""
        return f"{self.secret}.{name}"

    def find(self, key: str) -> tuple[str, Session]:
        """Return an episode and its name, begun by its first request. Raises RequestError."""
        secret, _, name = key.rpartition(".")
        known = secrets.compare_digest(secret.encode(), self.secret.encode())
        if not known or not NAME.fullmatch(name):
            raise RequestError(
                "the API key is not SECRET.EPISODE with this gateway's secret and a name of "
                "letters, digits, - and _",
                status=401,
                code="invalid_api_key",
            )
        if name in self._ended:
            raise RequestError(f"episode {name} has ended", status=403, code="episode_over")
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                raise RequestError(f"{MOST_OPEN} episodes are open; end some", status=429)
            self._open[name] = self._begin(name)
        return name, self._open[name]

    def end(self, name: str) -> Session:
        """Close an episode and return it. Its key serves nothing any more."""
        self._ended.add(name)
        return self._open.pop(name)

    @property
    def names(self) -> list[str]:
        return list(self._open)
