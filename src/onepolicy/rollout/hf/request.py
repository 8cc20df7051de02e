"""One request on its way through an engine, and what the engine asks of whatever runs its batch."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from onepolicy.types import Completion, Finish, Sampling


@dataclass(eq=False, slots=True)
class Request:
    prompt: np.ndarray  # [P] int64
    sampling: Sampling
    seed: int
    future: asyncio.Future[Completion]

    @property
    def limit(self) -> int:
        """Longest path this request may become, in tokens."""
        return len(self.prompt) + self.sampling.max_tokens

    def finish(self, last_token: int) -> Finish:
        return "stop" if last_token in self.sampling.stop else "length"


class Batch(Protocol):
    """Runs requests together, a step at a time."""

    @property
    def busy(self) -> bool: ...

    def running(self) -> AbstractContextManager[None]:
        """Held while steps are made."""
        ...

    def admit(self, waiting: deque[Request]) -> None:
        """Take from the left what can start now."""
        ...

    def step(self, version: int) -> list[tuple[Request, Completion]]:
        """Sample one token of every running request. Returns those that ended."""
        ...

    def clear(self) -> None:
        """Drop running requests and everything cached."""
        ...
