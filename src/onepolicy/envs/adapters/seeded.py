"""Problems of environments that are given by a seed: the same problem is the same episode for every sibling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.envs.tasks.seeding import digest
from onepolicy.interfaces import EpisodeError, Problem

START_UP = 16


class Seeded:
    """Training ids count up from 0, held-out ids down from -1. `entry["seed"]` is a function of (key, id) alone; small
    environments may well begin alike for different seeds."""

    def __init__(self, key: tuple[object, ...], opening: Callable[[int], str]) -> None:
        """opening: what the policy is asked in the episode of a seed."""
        self._key, self._opening = key, opening

    def train_problem(self, index: int) -> Problem:
        seed = digest(*self._key, index) % 2**31
        return Problem(index, self._opening(seed), "", {"seed": seed})

    def held_out(self, count: int) -> list[Problem]:
        return [self.train_problem(-1 - i) for i in range(count)]

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(index) for index in range(START_UP)]


@contextmanager
def failing(name: str, errors: tuple[type[Exception], ...] = LIBRARY_ERRORS) -> Iterator[None]:
    """What an environment raises ends the episode, not the run."""
    try:
        yield
    except errors as error:
        raise EpisodeError(f"{name} failed: {error!r}") from error


def scaled(value: float, returns: tuple[float, float]) -> float:
    """A return as a reward: returns[0] becomes 0, returns[1] becomes 1, what is beyond them is cut."""
    low, high = returns
    return min(max((value - low) / (high - low), 0.0), 1.0)
