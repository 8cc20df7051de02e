"""`Fleet`: several engines as one, which share requests and take over those of a lost one."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from onepolicy.interfaces import EngineCaps, MetricsSource
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.types import Completion, Sampling

T = TypeVar("T")
LOG = logging.getLogger(__name__)


class MemberEngine(Protocol):
    """An engine that a fleet may have."""

    name: str
    caps: EngineCaps

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion: ...

    async def reset_cache(self) -> None: ...


E = TypeVar("E", bound=MemberEngine)


@dataclass(eq=False)
class Member(Generic[E]):
    """An engine of a fleet and its requests."""

    name: str
    engine: E
    is_lost: bool = False
    is_silent: bool = False  # it did not answer when it was asked for last, while lost
    is_new: bool = False  # it waits for its first weights, and gets no requests
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    last_used: float = -1e9  # time.monotonic()
    served: int = 0  # completions whose weights no reply names
    confirmed: int = 0  # those of them before a check that found this run's weights
    check: asyncio.Task[None] | None = None  # the last one before a request


class Fleet(Generic[E]):
    """Several engines that share requests. One that is lost gets none.

    A subclass gives them weights.
    """

    def __init__(self, members: Sequence[Member[E]], slack: float) -> None:
        """Combine the engines. slack: of `Placement`."""
        assert members
        self.version = 0
        self.adapter: str | None = None  # that the engines sample with, or have in their weights
        self._all = list(members)
        self._placement = Placement(slack)
        self._repeated, self._last_loss = 0, ""
        self.caps = common_caps([member.engine.caps for member in members])

    @property
    def _members(self) -> list[Member[E]]:
        return [member for member in self._all if not member.is_lost]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample with the engine that has the prompt's prefix, or with another if that is lost."""
        first = sampling.initial_prompt_len or len(prompt_ids)
        while True:
            member = self._choose(prompt_ids, first)
            work = self._generate_with(member, prompt_ids, sampling, seed)
            completion = await self._unless_lost(member, work)
            if completion is not None:
                path = [*prompt_ids, *completion.token_ids.tolist()]
                self._placement.note(path, first, member.name)
                if self.caps.takes_adapter:
                    return completion  # with the name that the engine found
                return dataclasses.replace(completion, adapter=self.adapter)
            self._repeated += 1

    async def _generate_with(
        self, member: Member[E], prompt_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        return await member.engine.generate(prompt_ids, sampling, seed=seed)

    def _choose(self, prompt_ids: Sequence[int], first: int) -> Member[E]:
        members = {member.name: member for member in self._members if not member.is_new}
        if not members:
            raise self._none_left()
        loads = {name: len(member.running) for name, member in members.items()}
        return members[self._placement.choose(prompt_ids, first, loads)]

    async def _unless_lost(self, member: Member[E], work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work, None if the engine is lost meanwhile."""
        task = asyncio.create_task(work)
        member.running.add(task)
        try:
            return await task
        except EngineLost as error:
            self._lose(member, error)
            return None
        except asyncio.CancelledError:
            ours = asyncio.current_task()
            assert ours is not None
            if member.is_lost and not ours.cancelling():
                return None
            task.cancel()
            raise
        finally:
            member.running.discard(task)

    def _lose(self, member: Member[E], error: EngineLost) -> None:
        """Send an engine no requests, and let its unfinished ones go to the others."""
        if member.is_lost:
            return
        member.is_lost, self._last_loss = True, str(error).split(". ")[0]
        LOG.warning(
            "%s is lost: %s; its %d requests go to the %d engines that are left",
            member.name,
            self._last_loss,
            len(member.running),
            len(self._members),
        )
        for task in member.running:
            task.cancel()

    def _none_left(self) -> EngineLost:
        names = ", ".join(member.name for member in self._all)
        return EngineLost(
            f"rollout.engine: none of the engines is left: {names}; the last: {self._last_loss}"
        )

    async def reset_cache(self) -> None:
        self._placement.forget()
        await self.on_each(lambda engine: engine.reset_cache())

    async def on_each(self, work: Callable[[E], Awaitable[None]]) -> None:
        """Await work(engine) for all engines that are not lost. Lose those that are gone."""
        await self._on_each(self._members, lambda _, engine: work(engine))

    async def _on_each(
        self, members: Sequence[Member[E]], call: Callable[[int, E], Awaitable[None]]
    ) -> None:
        """Await call(number, engine) for all members at once. Lose those that are gone."""
        results = await asyncio.gather(
            *(call(number, member.engine) for number, member in enumerate(members)),
            return_exceptions=True,
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineLost):
                self._lose(member, result)
            elif isinstance(result, BaseException):
                raise result
        if not self._members:
            raise self._none_left()

    def take_metrics(self) -> dict[str, float]:
        """Return the sums of the engines' metrics since the last call."""
        total: Counter[str] = Counter()
        for member in self._all:
            if isinstance(member.engine, MetricsSource):
                total.update(member.engine.take_metrics())
        if self._repeated:
            total["rollout/requests_repeated"] += self._repeated
        self._repeated = 0
        return dict(total)


class Placement:
    """The engines that episodes were sent to since their caches were emptied.

    Siblings go to the engine that hashing gives their prompt, and a later turn to the engine that
    has sampled the turn before it. A engine with more requests than its share gives new episodes to
    the next one in its prompt's order, and keeps later turns: their prefix is there only.
    """

    def __init__(self, slack: float) -> None:
        """Make one without paths.

        slack: share by which an engine may have more requests than the mean (consistent hashing
        with bounded loads, Mirrokni et al. 2018); infinite: where requests go depends on nothing
        else than their prompt, so a repeated run sends them to the same engines.
        """
        self._slack = slack
        self._sampled: dict[bytes, str] = {}  # digest of a path -> engine that has its cache
        self._lengths: dict[bytes, set[int]] = {}  # digest of a first prompt -> lengths of paths

    def choose(self, prompt: Sequence[int], first: int, loads: Mapping[str, int]) -> str:
        """Return the name of a engine.

        first: tokens of the episode's first prompt. loads: requests that each engine has.
        """
        begun = _digest(prompt[:first])
        for length in sorted(self._lengths.get(begun, ()), reverse=True):
            if length <= len(prompt):
                engine = self._sampled.get(_digest(prompt[:length]))
                if engine in loads:
                    assert engine is not None
                    return engine
        limit = (1 + self._slack) * (sum(loads.values()) + 1) / len(loads)
        order = sorted(loads, key=lambda name: _digest_of_pair(begun, name), reverse=True)
        return next(name for name in order if loads[name] < limit)

    def note(self, path: Sequence[int], first: int, engine: str) -> None:
        """Remember that a engine has sampled this path, prompt and completion."""
        self._sampled[_digest(path)] = engine
        self._lengths.setdefault(_digest(path[:first]), set()).add(len(path))

    def forget(self) -> None:
        """Forget all paths, because the engines' caches are empty."""
        self._sampled.clear()
        self._lengths.clear()


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def _digest_of_pair(begun: bytes, name: str) -> bytes:
    return hashlib.blake2b(begun + name.encode(), digest_size=8).digest()


def common_caps(caps: Sequence[EngineCaps]) -> EngineCaps:
    """Return the capabilities that all engines have.

    All have the same format of quantised weights, so the first one's sizes are as good as any.
    """
    dtypes = {each.weights_dtype for each in caps}
    weights_dtype: str | None = None
    if len(dtypes) == 1:
        (weights_dtype,) = dtypes
    return EngineCaps(
        returns_routes=all(each.returns_routes for each in caps),
        max_len=min(each.max_len for each in caps),
        returns_combine_weights=all(each.returns_combine_weights for each in caps),
        top_logprobs=min(each.top_logprobs for each in caps),
        seeded=all(each.seeded for each in caps),
        sizes=caps[0].sizes,
        weights_dtype=weights_dtype,
        takes_adapter=all(each.takes_adapter for each in caps),
        inexact_dtype=_coarsest({each.inexact_dtype for each in caps}),
    )


def _coarsest(dtypes: set[str | None]) -> str | None:
    """Return the dtype with the largest last places; None if there is none."""
    for dtype in ("bfloat16", "float32"):
        if dtype in dtypes:
            return dtype
    return None
