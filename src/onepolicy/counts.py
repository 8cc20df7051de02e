"""Counts of an environment, apart for each step's rollouts and for each evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TIMEOUTS, SKIPPED = "rollout/grader_timeouts", "rollout/grader_skipped"
"""Responses that a grader did not read in time; after too many of these, not at all."""
_PLAYERS: ContextVar[object] = ContextVar("players", default=None)


@contextmanager
def counted_apart() -> Iterator[None]:
    """Count the episodes played within, also by tasks begun there, apart from all others.

    Rollouts of later steps and an evaluation play in one environment at one time.
    """
    token = _PLAYERS.set(object())
    try:
        yield
    finally:
        _PLAYERS.reset(token)


class Counts:
    """The counts of those who play here, 0 at first."""

    def __init__(self) -> None:
        self._of: defaultdict[object, defaultdict[str, float]]
        self._of = defaultdict(lambda: defaultdict(float))

    @property
    def here(self) -> defaultdict[str, float]:
        """The counts of the episodes that this one is played with."""
        return self._of[_PLAYERS.get()]

    def take(self) -> defaultdict[str, float]:
        """Return these counts and begin anew."""
        return self._of.pop(_PLAYERS.get(), defaultdict(float))
