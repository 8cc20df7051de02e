"""One episode of a program: its history, its limits, and the engine that samples its turns."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from onepolicy.envs.multiturn.tokenization import decode_tokens
from onepolicy.gateway.history import History, Plan
from onepolicy.gateway.messages import Request, RequestError
from onepolicy.gateway.turns import Turn
from onepolicy.interfaces import RolloutEngine
from onepolicy.replay.checks import RouteSpec, check_completion
from onepolicy.rollout.collect import check_support
from onepolicy.types import Completion, Sampling

MOST_ANSWERS = 256
"""Answers of an episode that are kept for retries."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an episode, all its conversations together. None: no limit."""

    turns: int | None = None
    tokens: int | None = None  # sampled


class SampleTurn(Protocol):
    """A function that samples a planned turn.

    number: of the request in the episode. It also returns the engine's weight versions before and
    after, None if they are not known.
    """

    async def __call__(
        self, plan: Plan, number: int, max_tokens: int
    ) -> tuple[Completion, tuple[int, int] | None]: ...


def sampling_on(
    engine: RolloutEngine,
    sampling: Sampling,
    seeds: Callable[[int], int],
    *,
    route_spec: RouteSpec | None = None,
    name: str = "",
) -> SampleTurn:
    """Return a function that samples turns on an engine, and checks its replies.

    seeds: of the request by its number. route_spec: the form of right routes, None for a dense
    model. name: of the episode, for errors.
    """

    async def sample(
        plan: Plan, number: int, max_tokens: int
    ) -> tuple[Completion, tuple[int, int] | None]:
        own = dataclasses.replace(
            sampling,
            max_tokens=max_tokens,
            routes_from=plan.routes_from,
            initial_prompt_len=plan.initial_prompt_len,
        )
        before = engine.version
        completion = await engine.generate(plan.tokens, own, seed=seeds(number))
        request = f"{name}, request {number}"
        if own.support:
            check_support(completion, request)
        check_completion(completion, plan.tokens, route_spec, request)
        return completion, (before, engine.version)

    return sample


class Session:
    """A running episode."""

    def __init__(
        self,
        sample: SampleTurn,
        history: History,
        *,
        sampling: Mapping[str, Any],
        limits: Limits | None = None,
        name: str = "",
    ) -> None:
        """Begin an episode.

        sampling: the gateway's own settings by their names, which no client changes. name: for
        errors.
        """
        self._sample_turn, self.history, self.sampling = sample, history, dict(sampling)
        self.limits, self.name = limits or Limits(), name
        self.id, self.begun = secrets.token_hex(6), int(time.time())
        self.requests = self.counted = self.replayed = 0
        self.running = 0  # turns that are being sampled
        self.refused: RequestError | None = None  # the last one
        self._sampled = self._reserved = 0  # tokens
        self._turn_ended = asyncio.Event()
        self._closed = False
        self._work: set[asyncio.Future[Turn]] = set()
        self._answers: dict[str, tuple[str, asyncio.Future[Turn]]] = {}  # with their digests

    async def answer(
        self, request: Request, key: str | None = None, digest: str = "", *, repeated: bool = False
    ) -> Turn:
        """Return the next turn of a conversation.

        key, digest: the same for all tries of a client's request, and of its body. repeated: this
        may be a later try. It gets the first one's answer, also while that is being sampled. Raises
        RequestError if the request cannot be served, or has the key of another one.
        """
        if self._closed:
            raise RequestError("this episode has ended", status=409, code="ended")
        first, known = self._answers.get(key or "", ("", None))
        if known is not None and repeated:
            if digest != first:
                said = "idempotency-key: is of a request with another body; give each its own"
                raise RequestError(said, status=422)
            self.replayed += 1
        else:
            known = asyncio.ensure_future(self._sample(request))
            self._work.add(known)
            known.add_done_callback(self._work.discard)
            if key is not None:
                self._answers[key] = digest, known
            while len(self._answers) > MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
        try:
            return await asyncio.shield(known)  # the next try needs it if this client hangs up
        finally:
            failed = known.done() and (known.cancelled() or known.exception() is not None)
            if failed and key is not None and self._answers.get(key) == (digest, known):
                del self._answers[key]

    async def close(self) -> None:
        """End the turns that are still sampled, whose clients have gone, and take no more."""
        self._closed = True
        work = list(self._work)
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)

    def count_tokens(self, request: Request) -> int:
        """Return how many tokens a request has. It is counted, and samples nothing."""
        self.counted += 1
        return self.history.count_tokens(request)

    async def _sample(self, request: Request) -> Turn:
        own = self.sampling
        overridden = tuple((name, v) for name, v in request.sampling if own.get(name) != v)
        plan = self.history.plan(dataclasses.replace(request, sampling=overridden))
        max_tokens = await self._reserve(plan.max_tokens)
        try:
            return await self._sample_plan(plan, max_tokens)
        finally:
            self.running -= 1
            self._reserved -= max_tokens
            self._turn_ended.set()

    async def _sample_plan(self, plan: Plan, max_tokens: int) -> Turn:
        number, self.requests = self.requests, self.requests + 1
        completion, versions = await self._sample_turn(plan, number, max_tokens)
        stop = None
        if plan.request.stop:
            completion, stop = self._cut_at_stop(completion, plan.request.stop, len(plan.tokens))
        self._sampled += len(completion.token_ids)
        return self.history.record(plan, completion, versions, stop, number)

    async def _reserve(self, max_tokens: int) -> int:
        """Take a turn and at most so many of the episode's tokens, and return how many.

        Those that concurrent turns may still use are theirs; if none is left beside them, this one
        waits until one of them has ended. Raises RequestError if the episode's limits are reached.
        """
        turns, tokens = self.limits.turns, self.limits.tokens
        while True:
            if turns is not None and self.requests >= turns:
                raise RequestError(
                    f"this episode has had its {turns} turns", status=403, code="episode_over"
                )
            left = max_tokens
            if tokens is not None:
                if self._sampled >= tokens:
                    raise RequestError(
                        f"this episode has had its {tokens} tokens", status=403, code="episode_over"
                    )
                left = min(max_tokens, tokens - self._sampled - self._reserved)
            if left > 0:
                self.running += 1
                self._reserved += left
                return left
            self._turn_ended.clear()
            await self._turn_ended.wait()

    def _cut_at_stop(
        self, completion: Completion, stop: tuple[str, ...], prompt: int
    ) -> tuple[Completion, str | None]:
        """Return a completion up to the token that completes a stop text, and that text.

        The texts are looked for in all that was sampled, thoughts and calls included.
        """
        ids = completion.token_ids.tolist()
        tokenizer = self.history.renderer.tokenizer
        text = decode_tokens(tokenizer, ids)
        if not any(each in text for each in stop):
            return completion, None
        low, high = 1, len(ids)  # the fewest tokens whose text has a stop text in it
        while low < high:
            middle = (low + high) // 2
            text = decode_tokens(tokenizer, ids[:middle])
            if any(each in text for each in stop):
                high = middle
            else:
                low = middle + 1
        text = decode_tokens(tokenizer, ids[:low])
        first = min((each for each in stop if each in text), key=text.index)
        return cut_completion(completion, low, prompt), first


def cut_completion(completion: Completion, count: int, prompt: int) -> Completion:
    """Return the first `count` tokens of a completion, as one that reached its limit.

    prompt: number of tokens before it.
    """
    if count == len(completion.token_ids):
        return completion
    routing, tops, support = completion.routing, (None, None), completion.support
    if routing is not None:
        routing = routing.rows(0, prompt + count - 1 - completion.first_slot)
    if completion.top_ids is not None and completion.top_logp is not None:
        tops = completion.top_ids[:count], completion.top_logp[:count]  # type: ignore[assignment]
    if support is not None:
        support = support.at(slice(0, count))
    return dataclasses.replace(
        completion,
        token_ids=completion.token_ids[:count],
        logp=completion.logp[:count],
        version=completion.version[:count],
        finish="length",
        routing=routing,
        top_ids=tops[0],
        top_logp=tops[1],
        support=support,
    )
