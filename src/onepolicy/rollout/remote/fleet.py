"""`ServerFleet`: several inference servers as one engine (rollout.engine.url with several)."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from onepolicy.config import ServerEngineConfig, UsageError
from onepolicy.interfaces import AdapterSource, NamedWeights
from onepolicy.rollout.remote.addresses import server_urls
from onepolicy.rollout.remote.client import EngineLost, EngineUnreachable
from onepolicy.rollout.remote.engine import RemoteEngine, make_client
from onepolicy.rollout.remote.replicas import common_caps
from onepolicy.rollout.remote.shared_stream import SharedStream
from onepolicy.rollout.remote.start_up import refuse_nccl_without_cuda
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Completion, Sampling

T = TypeVar("T")
LOG = logging.getLogger(__name__)
TENSORS_AHEAD = 64  # of the slowest server, that a faster one may be sent
IDLE_S = 3.0
"""Seconds without a request after which a server is asked for its weights before the next one. No
server restarts faster, and a restart while it has requests is noticed by these."""


def build(spec: EngineSpec) -> RemoteEngine | ServerFleet:
    """Build the engine over one server or several, and load the model's weights into them."""
    config = spec.config
    assert isinstance(config, ServerEngineConfig)
    refuse_nccl_without_cuda(spec)
    if not config.has_several:
        engine = make_client(spec)
        asyncio.run(engine.start(spec.model.path))
        return engine

    def make(url: str) -> RemoteEngine:
        own = config.model_copy(update={"url": url})
        return make_client(dataclasses.replace(spec, config=own))

    fleet = ServerFleet(make, lambda: server_urls(config.url))
    asyncio.run(fleet.start(spec.model.path))
    return fleet


@dataclass(eq=False)
class Member:
    """A server of the fleet and its requests."""

    url: str
    engine: RemoteEngine
    is_lost: bool = False
    is_new: bool = False  # it waits for its first weights, and gets no requests
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    last_used: float = -IDLE_S  # time.monotonic()


class ServerFleet:
    """A RolloutEngine over several servers.

    Each is a PersistentEngine. One that is lost gets no requests, and its unfinished ones are
    repeated on the others. Every weight update looks for lost and new servers: one that answers is
    checked as at the start of a run and takes part in the update, so it has the learner's weights
    before it has a request. If no server is left, the run waits for one (run/recovery.py).
    """

    def __init__(
        self,
        make: Callable[[str], RemoteEngine],
        urls: Callable[[], Sequence[str]],
    ) -> None:
        """Make a client of each server. Call `start` before any other method.

        make: a client of the server at an address. urls: the present addresses; a file or a name
        server may change them.
        """
        self.version = 0
        self._make, self._urls = make, urls
        self._all = [Member(url, make(url)) for url in urls()]
        self._placement = Placement()
        self._repeated = 0
        self.caps = common_caps([member.engine.caps for member in self._all])
        self.adapter: str | None = None  # that the servers sample with, or have in their weights

    async def start(self, path: str) -> None:
        """Connect all servers and load the checkpoint at `path` into them.

        Raises UsageError if one does not answer or does not fit.
        """
        for member in self._all:
            await member.engine.start(path)
        self._set_caps()

    def _set_caps(self) -> None:
        self.caps = common_caps([member.engine.caps for member in self._members])

    @property
    def _members(self) -> list[Member]:
        return [member for member in self._all if not member.is_lost]

    # --- requests ---------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample with the server that has the prompt's prefix, or with another if that is lost."""
        first = sampling.initial_prompt_len or len(prompt_ids)
        while True:
            member = self._choose(prompt_ids, first)
            work = self._generate_with(member, prompt_ids, sampling, seed)
            completion = await self._unless_lost(member, work)
            if completion is not None:
                path = [*prompt_ids, *completion.token_ids.tolist()]
                self._placement.note(path, first, member.url)
                if self.caps.takes_adapter:
                    return completion  # with the name that the server's client found
                return dataclasses.replace(completion, adapter=self.adapter)
            self._repeated += 1

    async def _generate_with(
        self, member: Member, prompt_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        idle = len(member.running) == 1 and time.monotonic() - member.last_used > IDLE_S
        if idle:
            await member.engine.confirm_weights()
        completion = await member.engine.generate(prompt_ids, sampling, seed=seed)
        member.last_used = time.monotonic()
        return completion

    def _choose(self, prompt_ids: Sequence[int], first: int) -> Member:
        members = {member.url: member for member in self._members if not member.is_new}
        if not members:
            raise EngineLost(_none_left(self._all))
        loads = {url: len(member.running) for url, member in members.items()}
        return members[self._placement.choose(prompt_ids, first, loads)]

    async def _unless_lost(self, member: Member, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work, None if the server is lost meanwhile."""
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

    def _lose(self, member: Member, error: EngineLost) -> None:
        """Send a server no requests, and let its unfinished ones go to the others."""
        if member.is_lost:
            return
        member.is_lost = True
        LOG.warning(
            "%s is lost: %s; its %d requests go to the %d servers that are left",
            member.url,
            str(error).split(". ")[0],
            len(member.running),
            len(self._members),
        )
        for task in member.running:
            task.cancel()

    # --- weights ----------------------------------------------------------------------------------

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load the weights into all servers at once, each tensor gathered once.

        A server that is lost meanwhile does not keep the others from their weights. With adapters
        these are the frozen weights, and only servers that lack them are sent them.
        """
        await self._readmit()
        self._placement.forget()
        self.version = -1
        members = self._members
        if self.caps.takes_adapter:
            members = await self._members_without_base()
        stream = SharedStream(weights, len(members), ahead=TENSORS_AHEAD)

        async def load(number: int, member: Member) -> None:
            try:
                await member.engine.load_weights(stream.read(number), version)
            finally:
                stream.close(number)

        await self._on_each(members, load)
        if not self.caps.takes_adapter:
            self._end_update(members)
        self.version = version

    async def lacks_base(self) -> bool:
        """Return whether a server needs the frozen weights before an adapter."""
        await self._readmit()
        return bool(await self._members_without_base())

    async def _members_without_base(self) -> list[Member]:
        members = self._members
        return [each for each in members if await each.engine.lacks_base()]

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B into all servers at once. They have the frozen weights."""
        self._placement.forget()
        self.version = -1
        members = self._members

        async def load(_: int, member: Member) -> None:
            await member.engine.load_adapter(adapter, version)

        await self._on_each(members, load)
        self._end_update(members)
        self.version = version

    def _end_update(self, members: Sequence[Member]) -> None:
        for member in members:
            member.is_new = False

    async def reset_cache(self) -> None:
        self._placement.forget()
        await self._on_each(self._members, lambda _, member: member.engine.reset_cache())

    async def confirm_weights(self) -> None:
        """Raise EngineLost if a server that may have sampled holds other weights."""
        members = self._members
        await self._on_each(members, lambda _, member: member.engine.confirm_weights())
        lost = [member.url for member in members if member.is_lost]
        if lost:
            raise EngineLost(
                f"rollout.engine.url: {', '.join(lost)} may have sampled with other weights"
            )

    async def _on_each(
        self, members: Sequence[Member], call: Callable[[int, Member], Awaitable[None]]
    ) -> None:
        """Await the call for all servers at once. Lose those that are gone."""
        results = await asyncio.gather(
            *(call(number, member) for number, member in enumerate(members)),
            return_exceptions=True,
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineLost):
                self._lose(member, result)
            elif isinstance(result, BaseException):
                raise result
        if not self._members:
            raise EngineLost(_none_left(self._all))

    # --- servers that come back -------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect those servers that answer, after all or some were lost.

        They hold the weights they were started with until the next update. Raises EngineUnreachable
        if none answers.
        """
        for member in self._all:
            member.is_lost = True
        await self._readmit()
        if not self._members:
            raise EngineUnreachable(_none_left(self._all))

    async def _readmit(self) -> None:
        """Connect lost and new servers that answer. They then wait for weights."""
        self._update_addresses()
        lost = [member for member in self._all if member.is_lost]
        await asyncio.gather(*map(self._admit, lost))

    def _update_addresses(self) -> None:
        """Follow a list of addresses that has changed."""
        try:
            urls = self._urls()
        except UsageError as error:
            LOG.warning("%s; the servers stay as they are", error)
            return
        known = {member.url for member in self._all}
        self._all = [m for m in self._all if m.url in urls or not m.is_lost]
        self._all += [Member(u, self._make(u), is_lost=True) for u in urls if u not in known]

    async def _admit(self, member: Member) -> None:
        """Connect and check a server as at the start of a run, if it answers."""
        engine = member.engine
        if not await engine.answers():
            return
        try:
            await engine.come_back()
        except UsageError as error:
            LOG.warning("%s answers again, but is not used: %s", member.url, error)
            return
        member.is_lost, member.is_new, member.last_used = False, True, time.monotonic()
        LOG.warning("%s is back; it gets the weights before it gets requests", member.url)

    def take_metrics(self) -> dict[str, float]:
        """Return the sums of the servers' metrics since the last call, and their number."""
        total: Counter[str] = Counter()
        for member in self._all:
            total.update(member.engine.take_metrics())
        total["rollout/requests_repeated"] = self._repeated
        self._repeated = 0
        metrics: dict[str, float] = dict(total)
        return metrics | {"rollout/servers": len(self._members)}


def _none_left(members: Sequence[Member]) -> str:
    urls = ", ".join(member.url for member in members)
    return f"rollout.engine.url: none of the servers is left: {urls}"


SLACK = 0.25
"""Share by which a server may have more requests than the mean (consistent hashing with bounded
loads, Mirrokni et al. 2018)."""


class Placement:
    """The servers that episodes were sent to since their caches were emptied.

    Siblings go to the server that hashing gives their prompt, and a later turn to the server that
    has sampled the turn before it. A server with more requests than its share gives new episodes to
    the next one in its prompt's order, and keeps later turns: their prefix is there only.
    """

    def __init__(self) -> None:
        self._sampled: dict[bytes, str] = {}  # digest of a path -> server that has its cache
        self._lengths: dict[bytes, set[int]] = {}  # digest of a first prompt -> lengths of paths

    def choose(self, prompt: Sequence[int], first: int, loads: Mapping[str, int]) -> str:
        """Return the name of a server.

        first: tokens of the episode's first prompt. loads: requests that each server has.
        """
        begun = _digest(prompt[:first])
        for length in sorted(self._lengths.get(begun, ()), reverse=True):
            if length <= len(prompt):
                server = self._sampled.get(_digest(prompt[:length]))
                if server in loads:
                    assert server is not None
                    return server
        limit = math.ceil((1 + SLACK) * (sum(loads.values()) + 1) / len(loads))
        order = sorted(loads, key=lambda name: _digest_of_pair(begun, name), reverse=True)
        return next(name for name in order if loads[name] < limit)

    def note(self, path: Sequence[int], first: int, server: str) -> None:
        """Remember that a server has sampled this path, prompt and completion."""
        self._sampled[_digest(path)] = server
        self._lengths.setdefault(_digest(path[:first]), set()).add(len(path))

    def forget(self) -> None:
        """Forget all paths, because the servers' caches are empty."""
        self._sampled.clear()
        self._lengths.clear()


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def _digest_of_pair(begun: bytes, name: str) -> bytes:
    return hashlib.blake2b(begun + name.encode(), digest_size=8).digest()
