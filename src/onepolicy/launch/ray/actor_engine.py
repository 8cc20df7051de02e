"""`ActorEngine`: an engine in a Ray actor, which Ray restarts and whose requests Ray repeats.

A completion is a function of the prompt, the sampling settings and the seed. So a request that a
lost process did not answer may be answered by its successor. Ray notices that a process or a node
is gone, but not that a process stands still: the driver asks for a sign of life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from onepolicy.config import TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.interfaces import EngineCaps
from onepolicy.launch.ray.replica_actor import EngineState, Moment
from onepolicy.replay.checks import RoutingError
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)
GONE_FOR_GOOD = (ActorDiedError, ActorUnschedulableError, OutOfMemoryError)
"""Errors of a call to a process that Ray restarts no more. A ping gets them too early, though."""
PROCESS_LOST = (RayActorError, ObjectLostError, NodeDiedError, *GONE_FOR_GOOD[1:])
"""Errors of a call to a process that is gone."""
TRANSFERS = 3
"""Times that a process asks Ray for weights that were lost on their way."""
PING_S = 1.0
"""Seconds from one sign of life to the next."""
LAST_PING_S = 10.0
"""Seconds that a process which is late has for one more sign of life, before it is given up."""
REPLY_CHECKS = 10
"""Number of checks for a reply before the caller gives up."""


class ActorEngine:
    """A rollout engine in a ReplicaProcess."""

    def __init__(
        self,
        name: str,
        actor: Any,
        state: EngineState,
        loaded: tuple[EngineCaps, int, str],
        config: RayCluster,
    ) -> None:
        """Connect to an engine that has been built. loaded: reply of `ReplicaProcess.load`."""
        self.name, self._actor, self._state, self._config = name, actor, state, config
        self.caps, self.version, self._process = loaded
        self._places: list[asyncio.Future[Moment]] = []  # of requests that begin the next moment
        self._moments = itertools.count()
        self._given_up: list[Any] = []  # replies to cancelled requests, which may still run
        self._waiting = self._loading = 0  # calls
        self._load_began = 0.0
        self._lost_transfers = 0  # one after another
        self._watcher: asyncio.Task[None] | None = None
        self._gone_since: float | None = None
        self._former: set[str] = set()  # processes that are gone
        self._why_lost = f"is gone for good (cluster.restarts = {config.restarts})"
        self._restart_count = self._repeated_count = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Return the completion of one request.

        Raises EngineLost if the process is gone for good.
        """
        while True:
            moment = await self._next_moment()
            request = (list(prompt_ids), sampling, seed, self._state, moment)
            reply = self._actor.generate.remote(*request)
            try:
                completion, process = await self._answer(reply)
            except PROCESS_LOST:  # its completion was lost on its way
                self._repeated_count += 1
                await asyncio.sleep(PING_S)
                continue
            except asyncio.CancelledError:
                ray.cancel(reply)
                self._given_up.append(reply)
                raise
            self._note(process)
            self._repeated_count += process != moment.process
            return completion

    def _next_moment(self) -> asyncio.Future[Moment]:
        """Return the place of a request among all of this turn of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._places:
            loop.call_soon(self._begin_moment)  # in the next turn
        self._places.append(loop.create_future())
        return self._places[-1]

    def _begin_moment(self) -> None:
        places = [each for each in self._places if not each.done()]
        self._places, number = [], next(self._moments)
        for place, each in enumerate(places):
            each.set_result(Moment(self._process, number, place, len(places)))

    async def load(self, weights: Sequence[Any], version: int) -> None:
        """Load weights. The engine has no older ones afterwards, also in a new process."""
        update = self._state.update + 1
        self._state = dataclasses.replace(
            self._state, update=update, version=version, weights=tuple(weights)
        )
        self.version = -1
        await self._end_cancelled()
        self._loading, self._load_began = self._loading + 1, time.monotonic()
        self._end_watch()  # the next one knows that it loads
        try:
            _, self.version, process = await self._call(self._actor.load)
        finally:
            self._loading -= 1
        self._note(process)

    async def reset_cache(self) -> None:
        """Discard the engine's cached prefixes. A new process has none."""
        await self._call(self._actor.reset_cache)

    def take_metrics(self) -> dict[str, float]:
        """Return the counts of restarts and repeated requests since the last call, if not 0."""
        counts = {
            "rollout/replica_restarts": self._restart_count,
            "rollout/requests_repeated": self._repeated_count,
        }
        self._restart_count = self._repeated_count = 0
        return {name: count for name, count in counts.items() if count}

    async def _call(self, method: Any) -> Any:
        """Call a method that no cancelled request may run beside, until it is answered."""
        await self._end_cancelled()
        while True:
            try:
                return await self._answer(method.remote(self._state))
            except PROCESS_LOST:
                await asyncio.sleep(PING_S)

    async def _end_cancelled(self) -> None:
        """Wait until no cancelled request runs any more, at most cluster.reply_timeout."""
        given_up, self._given_up = self._given_up, []
        if given_up:
            ended = asyncio.gather(*given_up, return_exceptions=True)
            with suppress(TimeoutError):  # the engine says then what runs
                await asyncio.wait_for(self._answer(ended), self._config.reply_timeout)

    async def _answer(self, reply: Any) -> Any:
        """Return the reply, and watch the process until then. Raises EngineLost."""
        self._waiting += 1
        if self._watcher is None or self._watcher.done():
            if self._gone_since is not None and self._waiting == 1:  # nobody has waited since
                self._gone_since = time.monotonic()
            self._watcher = asyncio.create_task(self._watch())
        try:
            answer = await reply
        except GONE_FOR_GOOD as error:
            self._state = dataclasses.replace(self._state, weights=())  # nobody reads them again
            why = self._why_lost
            if not isinstance(error, ActorDiedError):  # the node had no memory left, or is no more
                why = f"{why}: {str(error).strip().splitlines()[0]}"
            raise EngineLost(f"{self.name} {why}") from error
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                self._lost_transfers += 1
                if self._lost_transfers < TRANSFERS:
                    raise error.cause from None
            raise remote_error(self.name, error) from None
        else:
            self._lost_transfers = 0
            return answer
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._end_watch()

    def _end_watch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self) -> None:
        """Let Ray restart a process that is silent, and give up one that does not come back."""
        left = math.inf
        while left > 0 or self._seconds_left() > 0:
            limit = left = self._seconds_left()
            if left <= 0:  # perhaps this process was busy, not that one
                limit = LAST_PING_S
            try:
                process, is_ready = await self._ping(limit)
            except TimeoutError:
                if self._gone_since is None:
                    self._restart("no answer")
                elif left <= 0:
                    break
            except PROCESS_LOST as error:  # whoever waits is told if it is for good
                self._miss(type(error).__name__)
                await asyncio.sleep(PING_S)
            else:
                if not is_ready:
                    self._miss("another process")
                    await asyncio.sleep(PING_S)
                elif self._load_seconds_left() <= 0:
                    self._restart("its weights do not arrive")
                else:
                    self._note(process)
        most = f"{self._config.restart_timeout:g} s (cluster.restart_timeout)"
        self._why_lost = f"did not come back within {most}"
        ray.kill(self._actor)

    def _restart(self, reason: str) -> None:
        self._miss(reason)
        self._former.add(self._process)
        ray.kill(self._actor, no_restart=False)

    def _load_seconds_left(self) -> float:
        if not self._loading or self._gone_since is not None:  # it loads anew when it is back
            return math.inf
        return self._load_began + self._config.restart_timeout - time.monotonic()

    def _seconds_left(self) -> float:
        """Return how long the process may be silent."""
        if self._gone_since is not None:
            return self._gone_since + self._config.restart_timeout - time.monotonic()
        if self._loading:
            return self._config.restart_timeout
        return self._config.reply_timeout

    async def _ping(self, limit: float) -> tuple[str, bool]:
        ping = self._actor.ping.options(max_task_retries=0)
        pause = min(PING_S, self._config.reply_timeout / 2)
        if self._gone_since is not None:  # each second of its limit counts
            pause = 0.0
        reply = ping.remote(pause)
        return await wait_for_reply(asyncio.ensure_future(reply), limit)

    def _miss(self, reason: str) -> None:
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            LOG.warning("%s is gone (%s); waiting for Ray to restart it", self.name, reason)

    def _note(self, process: str) -> None:
        """Note that this process has answered. Count a restart if it is another than before."""
        if process in self._former:
            return  # its answer comes late
        if process != self._process:
            self._miss("another process")
            self._former.add(self._process)
            self._process = process
            self._restart_count += 1
        if self._gone_since is not None:
            LOG.warning("%s is back after %.1f s", self.name, time.monotonic() - self._gone_since)
            self._gone_since = None
            self._load_began = time.monotonic()  # anew


async def wait_for_reply(reply: asyncio.Future[Any], limit: float) -> Any:
    """Return the result of `reply`. Raises TimeoutError if there is none after `limit` seconds.

    The limit is divided into REPLY_CHECKS checks. A blocked event loop costs one check, however
    long it is blocked, so a reply that arrived meanwhile is not lost.
    """
    checks_left = REPLY_CHECKS
    try:
        while not reply.done():
            if checks_left == 0:
                raise TimeoutError
            await asyncio.wait((reply,), timeout=limit / REPLY_CHECKS)
            checks_left -= 1
        return reply.result()
    finally:
        reply.cancel()


def remote_error(name: str, error: RayTaskError) -> Exception:
    """Return the error that a method of process `name` raised, as an error of this process."""
    cause = error.cause
    for kind in (RoutingError, TrainingError, UsageError):
        if isinstance(cause, kind):
            return kind(f"{name}: {cause}")
    return TrainingError(f"{name}: {type(cause).__name__}: {cause}")
