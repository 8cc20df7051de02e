"""The choice of a server for a request: its prefix's server, unless that has too much to do."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

SLACK = 0.25
"""Share by which a server may have more requests than the mean (consistent hashing with bounded
loads, Mirrokni et al. 2018)."""


class Placement:
    """The servers that episodes were sent to since their caches were emptied.

    Siblings go to the server that hashing gives their prompt, and a later turn to the server that
    has sampled the turn before it. A server with more requests than its share gives new episodes to
    the next one in its prompt's order, and keeps later turns: their prefix is there only.
    """

    def __init__(self) -> None:
        self._sampled: dict[bytes, str] = {}  # digest of a path -> server that has its cache
        self._lengths: dict[bytes, set[int]] = {}  # digest of a first prompt -> lengths of paths

    def choose(self, prompt: Sequence[int], first: int, loads: Mapping[str, int]) -> str:
        """Return the name of a server.

        first: tokens of the episode's first prompt. loads: requests that each server has.
        """
        begun = _digest(prompt[:first])
        for length in sorted(self._lengths.get(begun, ()), reverse=True):
            if length <= len(prompt):
                server = self._sampled.get(_digest(prompt[:length]))
                if server in loads:
                    assert server is not None
                    return server
        limit = math.ceil((1 + SLACK) * (sum(loads.values()) + 1) / len(loads))
        order = sorted(loads, key=lambda name: _digest_of_pair(begun, name), reverse=True)
        return next(name for name in order if loads[name] < limit)

    def note(self, path: Sequence[int], first: int, server: str) -> None:
        """Remember that a server has sampled this path, prompt and completion."""
        self._sampled[_digest(path)] = server
        self._lengths.setdefault(_digest(path[:first]), set()).add(len(path))

    def forget(self) -> None:
        """Forget all paths, because the servers' caches are empty."""
        self._sampled.clear()
        self._lengths.clear()


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def _digest_of_pair(begun: bytes, name: str) -> bytes:
    return hashlib.blake2b(begun + name.encode(), digest_size=8).digest()
