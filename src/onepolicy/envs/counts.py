"""Counts of an environment, apart for each step's rollouts and for each evaluation."""

from __future__ import annotations

from collections import defaultdict

from onepolicy.types import PLAYERS

TIMEOUTS, SKIPPED = "rollout/grader_timeouts", "rollout/grader_skipped"
"""Responses that a grader did not read in time; after too many of these, not at all."""


class Counts:
    """The counts of those who play here, 0 at first."""

    def __init__(self) -> None:
        self._of: defaultdict[object, defaultdict[str, float]]
        self._of = defaultdict(lambda: defaultdict(float))

    @property
    def here(self) -> defaultdict[str, float]:
        """The counts of the episodes that this one is played with."""
        return self._of[PLAYERS.get()]

    def take(self) -> defaultdict[str, float]:
        """Return these counts and begin anew."""
        return self._of.pop(PLAYERS.get(), defaultdict(float))
