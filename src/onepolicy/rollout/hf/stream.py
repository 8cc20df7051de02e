"""A CUDA stream of its own for an engine that samples while the learner works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FIRST = -1  # the priority of a decode step's short kernels over the learner's long ones


class EngineStream:
    """The stream on which an engine makes its steps.

    On the stream that all threads share, the read at the end of a decode step would wait for
    everything that the learner has queued.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the stream. It begins after everything that is queued, as are the weights."""
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=FIRST)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Queue the work of this context on the stream. No coroutine may run inside."""
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """Let the work of this context, which replaces weights, come between two steps."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        yield
        self._stream.wait_stream(current)
