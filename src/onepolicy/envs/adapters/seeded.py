"""Problems that a seed defines: the same problem is the same episode for every sibling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.envs.tasks.seeding import hash_key
from onepolicy.interfaces import EpisodeError, Problem

NUM_STARTUP_PROBLEMS = 16


class SeededProblems:
    """Problems with a seed in `entry["seed"]`, a function of (key, id) alone.

    Training ids count up from 0, held-out ids down from -1. Small environments may start alike for
    different seeds.
    """

    def __init__(self, key: tuple[object, ...], make_prompt: Callable[[int], str]) -> None:
        """Store the settings. make_prompt: seed -> prompt of the episode."""
        self._key, self._make_prompt = key, make_prompt

    def train_problem(self, index: int) -> Problem:
        seed = hash_key(*self._key, index) % 2**31
        return Problem(index, self._make_prompt(seed), "", {"seed": seed})

    def held_out(self, count: int) -> list[Problem]:
        return [self.train_problem(-1 - i) for i in range(count)]

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(index) for index in range(NUM_STARTUP_PROBLEMS)]


@contextmanager
def as_episode_error(
    name: str, errors: tuple[type[Exception], ...] = LIBRARY_ERRORS
) -> Iterator[None]:
    """Raise EpisodeError for an environment's error, which ends the episode and not the run."""
    try:
        yield
    except errors as error:
        raise EpisodeError(f"{name} failed: {error!r}") from error


def scale_return(value: float, returns: tuple[float, float]) -> float:
    """Return the reward of a return: returns[0] maps to 0, returns[1] to 1, clipped to [0, 1]."""
    low, high = returns
    return min(max((value - low) / (high - low), 0.0), 1.0)
