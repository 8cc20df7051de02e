"""Requests on their way through an engine in this process, and the task that runs their batch step by step.

While there are requests, one task makes steps on the event loop, so calls made at any time join the running batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.interfaces import EngineCaps
from onepolicy.types import Completion, FinishReason, Sampling


@dataclass(eq=False, slots=True)
class SequenceRequest:
    prompt: np.ndarray  # [P] int64
    sampling: Sampling
    seed: int
    future: asyncio.Future[Completion]
    drawn: int = 0
    """Random numbers of the seed that are used up: tokens at the end of `prompt` that this completion sampled before an
    update interrupted it."""
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Ids and log-probabilities [k] of the likeliest tokens, one pair for every token sampled, if asked for."""

    @property
    def limit(self) -> int:
        """Longest path this request may become, in tokens."""
        return len(self.prompt) + self.sampling.max_tokens

    def finish_reason(self, last_token: int) -> FinishReason:
        return "stop" if last_token in self.sampling.stop else "length"

    def add_top_logprobs(self, ids: Tensor | None, logp: Tensor | None, row: int) -> None:
        """ids, logp [B, at least k], likeliest first, of the token just sampled in `row`; None if no row asks."""
        if asked := self.sampling.top_logprobs:
            assert ids is not None
            assert logp is not None
            self.top.append((ids[row, :asked], logp[row, :asked]))

    def stack_top_logprobs(self) -> tuple[Tensor | None, Tensor | None]:
        """[n, k] int32 and [n, k] float32 of a Completion, None if not asked for."""
        if not self.top:
            return None, None
        ids, logp = (torch.stack(rows).cpu() for rows in zip(*self.top, strict=True))
        return ids.int(), logp


class Batch(Protocol):
    """Runs requests together, a step at a time."""

    @property
    def busy(self) -> bool: ...

    def step_context(self) -> AbstractContextManager[None]:
        """Held while steps are made."""
        ...

    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """Take from the left what can start now."""
        ...

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Sample one token of every running request. Returns those that ended."""
        ...

    def clear(self) -> None:
        """Drop running requests and everything cached."""
        ...


class InterruptibleBatch(Batch, Protocol):
    """A batch whose requests can go on from their tokens under other weights."""

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """End every running request with what it has sampled so far."""
        ...


class BatchRunner:
    """Runs a batch while there are requests for it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._waiting: deque[SequenceRequest] = deque()
        self._pending: set[SequenceRequest] = set()
        self._task: asyncio.Task[None] | None = None
        self._version = 0

    async def run_request(
        self, prompt: np.ndarray, sampling: Sampling, seed: int, version: int, *, drawn: int = 0
    ) -> Completion:
        """prompt [P] int64; drawn: see Request. version: of the weights, which do not change while requests run.

        finish is "aborted" if `interrupt` came first, with what had been sampled until then, which may be nothing.
        """
        request = SequenceRequest(
            prompt, sampling, seed, asyncio.get_running_loop().create_future(), drawn
        )
        self._waiting.append(request)
        self._pending.add(request)
        self._version = version
        if self._task is None:
            self._start()
        try:
            return await request.future
        finally:
            self._pending.discard(request)

    def clear_cache(self, what: str) -> None:
        """Forget everything cached. RuntimeError, naming `what` was to be done, while requests are running."""
        if self._pending:
            raise RuntimeError(
                f"{what} while {len(self._pending)} requests are running; await them first"
            )
        self.batch.clear()

    def abort_requests(self, taken: list[tuple[SequenceRequest, Completion]]) -> None:
        """End every request, those of `taken` with what they have sampled, and forget everything cached."""
        for request, part in taken:
            if not request.future.done():
                request.future.set_result(part)
        for request in self._waiting:
            if not request.future.done():
                request.future.set_result(empty_completion(request.sampling.routes_from))
        self._waiting.clear()
        self.batch.clear()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._drive())
        self._task.add_done_callback(self._stopped)

    async def _drive(self) -> None:
        """Run the batch until nothing waits. Between two steps other coroutines run and may add requests."""
        with self.batch.step_context():
            while self._waiting or self.batch.busy:
                self.batch.admit(self._waiting)
                for request, completion in self.batch.step(self._version):
                    if not request.future.done():
                        request.future.set_result(completion)
                await asyncio.sleep(0)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """However the task ended, nobody is left waiting for it."""
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            if self._waiting:  # came between the task's last look and this call
                self._start()
            return
        self.batch.clear()
        self._waiting.clear()
        for request in self._pending:
            if request.future.done():
                continue
            if error is None:
                request.future.cancel()
            else:
                request.future.set_exception(error)


def empty_completion(first_slot: int) -> Completion:
    """Of a request that was interrupted before its first token."""
    none = torch.empty(0, dtype=torch.int32)
    return Completion(none, torch.empty(0), none, "aborted", first_slot=first_slot)


def check_request(
    prompt_ids: Sequence[int], sampling: Sampling, caps: EngineCaps, *, version: int, vocab: int
) -> np.ndarray:
    """The prompt as [P] int64, if an engine with weights of `version` (negative: half-loaded) can run the request."""
    if version < 0:
        raise RuntimeError(
            "the last load_weights failed half-way; load a complete set of weights first"
        )
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if prompt.ndim != 1 or not len(prompt) or prompt.min() < 0 or prompt.max() >= vocab:
        raise UsageError(f"prompt_ids: expected at least one token id in 0..{vocab - 1}")
    if not 0 <= sampling.routes_from < len(prompt):
        raise UsageError(
            f"routes_from: {sampling.routes_from} is not a slot of the {len(prompt)} prompt tokens"
        )
    if len(prompt) + sampling.max_tokens > caps.max_len:
        raise UsageError(
            f"max_tokens: {len(prompt)} prompt tokens + {sampling.max_tokens} exceed max_len {caps.max_len}; "
            "shorten the prompt, lower max_tokens or raise rollout.engine.max_len"
        )
    if sampling.top_logprobs > caps.top_logprobs:
        raise UsageError(
            f"top_logprobs: {sampling.top_logprobs}, but this engine returns at most {caps.top_logprobs}"
        )
    return prompt
