"""For environments that draw from the process's global random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class GlobalRandom:
    """An episode's own stream of Python's and numpy's global random numbers: whatever else draws from them in between,
    the episode sees the numbers that follow from its seed, and nobody else sees those."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Until it is left, global random numbers are this stream's. Nothing may be awaited inside."""
        outer = random.getstate(), np.random.get_state()
        self._put(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            self._put(outer)

    @staticmethod
    def _put(state: tuple) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
