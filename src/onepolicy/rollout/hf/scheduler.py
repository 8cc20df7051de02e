"""Requests of an engine in this process, and the task that runs their batch step by step.

While there are requests, one task makes steps on the event loop, so a new call joins the running
batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.interfaces import EngineCaps
from onepolicy.support.trace import KeptSet, SupportTrace
from onepolicy.types import Completion, FinishReason, Sampling


@dataclass(eq=False, slots=True)
class SequenceRequest:
    """A request to sample one sequence, and the future of its completion."""

    prompt: np.ndarray  # [P] int64
    sampling: Sampling
    seed: int
    future: asyncio.Future[Completion]
    num_drawn: int = 0
    """Random numbers of the seed that are used up. They sampled the tokens at the end of `prompt`,
    before an update interrupted the completion."""
    top: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Ids and log-probabilities [k] of the most likely tokens for every sampled token, if asked
    for."""

    sets: list[KeptSet] = field(default_factory=list)
    """What each sampled token was drawn from, if asked for."""

    @property
    def limit(self) -> int:
        """Most tokens of the prompt and the completion together."""
        return len(self.prompt) + self.sampling.max_tokens

    def finish_reason(self, last_token: int) -> FinishReason:
        if last_token in self.sampling.stop:
            return "stop"
        return "length"

    def add_support(self, sets: Sequence[KeptSet], row: int) -> None:
        """Store the set of the step that was just sampled in `row`, if this request asks for it."""
        if self.sampling.support:
            self.sets.append(sets[row])

    def join_support(self) -> SupportTrace | None:
        """Return the sets of the sampled tokens, None if not asked for."""
        if not self.sampling.support:
            return None
        support = SupportTrace.join(self.sets)
        if not self.sampling.support_logp:  # another request of the batch asked for them
            support = support.without_logp()
        return support

    def add_top_logprobs(self, ids: Tensor | None, logp: Tensor | None, row: int) -> None:
        """Store the most likely tokens of the step that was just sampled in `row`.

        ids, logp: [B, at least k], most likely first; None if no request asks for them.
        """
        k = self.sampling.top_logprobs
        if not k:
            return
        assert ids is not None
        assert logp is not None
        self.top.append((ids[row, :k], logp[row, :k]))

    def stack_top_logprobs(self) -> tuple[Tensor | None, Tensor | None]:
        """Return top_ids [n, k] int32 and top_logp [n, k] float32, None if not asked for."""
        if not self.top:
            return None, None
        ids, logp = (torch.stack(rows).cpu() for rows in zip(*self.top, strict=True))
        return ids.int(), logp


class Batch(Protocol):
    """A batch that runs requests together, one step at a time."""

    @property
    def busy(self) -> bool: ...

    def step_context(self) -> AbstractContextManager[None]:
        """Return a context in which all steps are made."""
        ...

    def admit(self, waiting: deque[SequenceRequest]) -> None:
        """Take the requests that can start now from the left of `waiting`."""
        ...

    def step(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """Sample one token of every running request. Return the requests that ended."""
        ...

    def clear(self) -> None:
        """Drop running requests and all caches."""
        ...


class InterruptibleBatch(Batch, Protocol):
    """A batch whose requests can be resumed from their tokens with other weights."""

    def abort_running(self, version: int) -> list[tuple[SequenceRequest, Completion]]:
        """End all running requests and return their completions so far."""
        ...


class BatchRunner:
    """The runner of a batch. It makes steps while there are requests."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.in_stream: Callable[[], AbstractContextManager[None]] = nullcontext
        self._waiting: deque[SequenceRequest] = deque()
        self._pending: set[SequenceRequest] = set()
        self._task: asyncio.Task[None] | None = None
        self._version = 0

    async def run_request(
        self, prompt: np.ndarray, sampling: Sampling, seed: int, version: int, *, num_drawn: int = 0
    ) -> Completion:
        """Return the completion of `prompt` [P] int64.

        version: of the weights, which do not change while requests run. num_drawn: see
        SequenceRequest. If `abort_requests` comes first, finish is "aborted" and the completion
        has the tokens sampled until then, perhaps none.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = SequenceRequest(prompt, sampling, seed, future, num_drawn)
        self._waiting.append(request)
        self._pending.add(request)
        self._version = version
        if self._task is None:
            self._start_task()
        try:
            return await request.future
        finally:
            self._pending.discard(request)

    def clear_cache(self, operation: str) -> None:
        """Drop all caches. Raise RuntimeError naming `operation` if requests are running."""
        if self._pending:
            raise RuntimeError(
                f"{operation} while {len(self._pending)} requests are running; await them first"
            )
        self.batch.clear()

    def abort_requests(self, aborted: list[tuple[SequenceRequest, Completion]]) -> None:
        """End every request and drop all caches.

        aborted: the running requests with their completions. Waiting requests get empty ones.
        """
        for request, completion in aborted:
            if not request.future.done():
                request.future.set_result(completion)
        for request in self._waiting:
            if not request.future.done():
                request.future.set_result(empty_completion(request.sampling.routes_from))
        self._waiting.clear()
        self.batch.clear()

    def _start_task(self) -> None:
        self._task = asyncio.create_task(self._run_steps())
        self._task.add_done_callback(self._on_task_end)

    async def _run_steps(self) -> None:
        """Step the batch until no request is left.

        Other coroutines run between two steps and may add requests.
        """
        with self.batch.step_context():
            while self._waiting or self.batch.busy:
                with self.in_stream():
                    self.batch.admit(self._waiting)
                    ended = self.batch.step(self._version)
                for request, completion in ended:
                    if not request.future.done():
                        request.future.set_result(completion)
                await asyncio.sleep(0)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Restart the task if requests came since its last step. After an error, end them all."""
        self._task = None
        cancelled = task.cancelled()
        error: BaseException | None = None
        if not cancelled:
            error = task.exception()
        if error is None and not cancelled:
            if self._waiting:
                self._start_task()
            return
        self._waiting.clear()
        for request in self._pending:
            if request.future.done():
                continue
            if error is None:
                request.future.cancel()
            else:
                request.future.set_exception(error)
        self.batch.clear()  # last: it may fail too


def empty_completion(first_slot: int) -> Completion:
    """Return the completion of a request that was aborted before its first token."""
    empty = torch.empty(0, dtype=torch.int32)
    return Completion(empty, torch.empty(0), empty, "aborted", first_slot=first_slot)


def check_request(
    prompt_ids: Sequence[int], sampling: Sampling, caps: EngineCaps, *, version: int, vocab: int
) -> np.ndarray:
    """Return the prompt as [P] int64 if the engine can run the request.

    Raises RuntimeError if `version` is negative: the weights are loaded only in part. Raises
    UsageError if the request does not fit the engine.
    """
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
            f"max_tokens: {len(prompt)} prompt tokens + {sampling.max_tokens} exceed max_len "
            f"{caps.max_len}; shorten the prompt, lower max_tokens or raise rollout.engine.max_len"
        )
    if sampling.top_logprobs > caps.top_logprobs:
        raise UsageError(
            f"top_logprobs: {sampling.top_logprobs}, but this engine returns at most "
            f"{caps.top_logprobs}; lower it"
        )
    if sampling.support and sampling.top_k >= vocab:
        raise UsageError(
            f"rollout.sampling.top_k: {sampling.top_k} keeps all {vocab} tokens of the model, so "
            "there is no support to record; set it to 0 (all), or lower it"
        )
    return prompt
