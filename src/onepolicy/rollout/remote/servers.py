"""One server or several as the engine of a run (rollout.engine.url)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from onepolicy.config import ServerEngineConfig, UsageError
from onepolicy.interfaces import AdapterSource, NamedWeights
from onepolicy.rollout.remote.addresses import server_urls
from onepolicy.rollout.remote.client import EngineLost, EngineUnreachable, OtherWeights
from onepolicy.rollout.remote.engine import RemoteEngine, make_client
from onepolicy.rollout.remote.fleet import Fleet, Member, common_caps
from onepolicy.rollout.remote.shared_stream import SharedStream
from onepolicy.rollout.remote.start_up import refuse_nccl_without_cuda
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)
SLACK = 0.25  # of Placement
BYTES_AHEAD = 2**28  # of the slowest server, that a faster one may be sent, and one tensor more
IDLE_S = 3.0
"""Seconds without a completion after which a server is asked for its weights before a request. No
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


class ServerFleet(Fleet[RemoteEngine]):
    """A RolloutEngine over several servers.

    Every weight update looks for lost and new servers: one that answers is checked as at the start
    of a run and takes part in the update, so it has the learner's weights before it has a request.
    The others repeat the requests of a lost server. If no server is left, or one is found with
    other weights that may have sampled its completions, the run recovers (run/recovery.py).
    """

    def __init__(
        self, make: Callable[[str], RemoteEngine], urls: Callable[[], Sequence[str]]
    ) -> None:
        """Make a client of each server. Call `start` before any other method.

        make: a client of the server at an address. urls: the present addresses; a file or a name
        server may change them.
        """
        super().__init__([Member(url, make(url)) for url in urls()], SLACK)
        self._make, self._urls = make, urls
        self._doubt = ""  # why the completions since the last recovery may not be used
        self._updates = 0  # begun
        self._unusable: set[str] = set()  # addresses that a list gained

    async def start(self, path: str) -> None:
        """Connect all servers and load the checkpoint at `path` into them.

        Raises UsageError if one does not answer or does not fit.
        """
        for member in self._all:
            await member.engine.start(path)
        self.caps = common_caps([member.engine.caps for member in self._members])

    async def _generate_with(
        self,
        member: Member[RemoteEngine],
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
    ) -> Completion:
        updating = self.version < 0  # it confirms by itself
        if not updating and time.monotonic() - member.last_used > IDLE_S:
            if member.check is None or member.check.done():  # all requests await one check
                member.check = asyncio.create_task(self._confirm(member))
                member.check.add_done_callback(_retrieve)
            await asyncio.shield(member.check)
        completion = await member.engine.generate(prompt_ids, sampling, seed=seed)
        member.last_used = time.monotonic()
        member.served += not member.engine.dialect.names_weights
        return completion

    async def _confirm(self, member: Member[RemoteEngine]) -> None:
        """Confirm the weights of a server, and so the completions that it has returned.

        While an update goes on, their name in the server may be ahead of ours.
        """
        served, updates = member.served, self._updates
        try:
            await member.engine.confirm_weights()
        except OtherWeights:
            if updates == self._updates:
                raise
            return
        member.confirmed = max(member.confirmed, served)
        member.last_used = time.monotonic()

    def _lose(self, member: Member[RemoteEngine], error: EngineLost) -> None:
        """Raise EngineLost if other weights may have sampled its completions.

        A server that gives no reply is not suspected: had it restarted before, the check of an idle
        server would have shown it.
        """
        super()._lose(member, error)
        count = member.served - member.confirmed
        if count and isinstance(error, OtherWeights):
            self._doubt = (
                f"rollout.engine.url: {member.name} may have sampled with other weights, {count} "
                f"completions: {error}"
            )
            raise EngineLost(self._doubt) from error

    # --- weights ----------------------------------------------------------------------------------

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load the weights into all servers at once, each tensor gathered once.

        A server that is lost meanwhile does not keep the others from their weights. With adapters
        these are the frozen weights, and only servers that lack them are sent them.
        """
        await self._readmit()
        members = self._members
        if self.caps.takes_adapter:
            members = await self._members_without_base()
        # Half of what a server's processes wait for the next tensors: so one that hangs amid the
        # update is lost before they give up the others'.
        limit = min((each.engine.dialect.config.timeout_s for each in members), default=0.0) / 2
        stream = SharedStream(
            weights, len(members), ahead=BYTES_AHEAD, size=lambda item: item[1].nbytes, limit=limit
        )

        async def load(number: int, engine: RemoteEngine) -> None:
            try:
                await engine.load_weights(stream.read(number), version)
            finally:
                stream.close(number)

        await self._update(members, load, version, ready=not self.caps.takes_adapter)

    async def lacks_base(self) -> bool:
        """Return whether a server needs the frozen weights before an adapter."""
        await self._readmit()
        return bool(await self._members_without_base())

    async def _members_without_base(self) -> list[Member[RemoteEngine]]:
        return [each for each in self._members if await each.engine.lacks_base()]

    async def load_adapter(self, adapter: AdapterSource, version: int) -> None:
        """Load A and B into all servers at once. They have the frozen weights."""
        await self._update(
            self._members, lambda _, engine: engine.load_adapter(adapter, version), version
        )

    async def _update(
        self,
        members: Sequence[Member[RemoteEngine]],
        load: Callable[[int, RemoteEngine], Awaitable[None]],
        version: int,
        *,
        ready: bool = True,
    ) -> None:
        """Load weights of this version into the members. ready: they may then have requests."""
        self._placement.forget()
        self._updates += 1
        self.version = -1
        await self._on_each(members, load)
        for member in members:
            member.is_new = member.is_new and not ready
        self.version = version

    async def confirm_weights(self) -> None:
        """Raise EngineLost if a server that may have sampled holds, or has held, other weights."""
        if self._doubt:
            raise EngineLost(self._doubt)
        members = self._members
        await self._on_each(members, lambda number, _: self._confirm(members[number]))
        lost = [member.name for member in members if member.is_lost]
        if lost:
            raise EngineLost(
                f"rollout.engine.url: {', '.join(lost)} may have sampled with other weights"
            )

    # --- servers that come back -------------------------------------------------------------------

    async def come_back(self) -> None:
        """Connect those servers that answer, after all or some were lost.

        They hold the weights they were started with until the next update. Raises EngineUnreachable
        if none answers.
        """
        self._doubt = ""  # the caller repeats the work
        for member in self._all:
            member.is_lost = True
        await self._readmit()
        if not self._members:
            raise EngineUnreachable(str(self._none_left()))

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
        known = {member.name for member in self._all} | self._unusable
        self._all = [m for m in self._all if m.name in urls or not m.is_lost]
        for url in urls:
            if url in known:
                continue
            try:
                self._all.append(Member(url, self._make(url), is_lost=True))
            except UsageError as error:
                self._unusable.add(url)
                LOG.warning("%s is not used: %s", url, error)

    async def _admit(self, member: Member[RemoteEngine]) -> None:
        """Connect and check a server as at the start of a run, if it answers."""
        engine = member.engine
        was_silent, member.is_silent = member.is_silent, not await engine.answers()
        if member.is_silent:
            if not was_silent:
                LOG.warning("%s does not answer; it is asked again later", member.name)
            return
        try:
            await engine.come_back()
            if common_caps([self.caps, engine.caps]) != self.caps:
                raise UsageError(f"it can do less than the run began with: {engine.caps}")
        except (UsageError, EngineLost) as error:
            LOG.warning("%s answers again, but is not used: %s", member.name, error)
            return
        member.is_lost, member.is_new, member.last_used = False, True, time.monotonic()
        member.confirmed = member.served  # or discarded
        LOG.warning("%s is back; it gets the weights before it gets requests", member.name)

    def take_metrics(self) -> dict[str, float]:
        """Return the sums of the servers' metrics since the last call, and their number."""
        always = {"rollout/requests_repeated": 0, "rollout/servers": len(self._members)}
        return always | super().take_metrics()


def _retrieve(check: asyncio.Task[None]) -> None:
    """Take the error of a check that no request awaits any more: the next one makes another."""
    if not check.cancelled():
        check.exception()
