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
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
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
PROCESS_LOST = (RayActorError, ObjectLostError, NodeDiedError)
"""Errors of a call to a process that is gone."""
PING_S = 1.0
"""Seconds from one sign of life to the next."""
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
        self._unsent: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._moments = itertools.count()
        self._waiting = self._loading = 0  # calls
        self._watcher: asyncio.Task[None] | None = None
        self._gone_since: float | None = None
        self._why_lost = f"is gone for good (cluster.restarts = {config.restarts})"
        self._restart_count = self._repeated_count = 0

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Return the completion of one request.

        Raises EngineLost if the process is gone for good.
        """
        while True:
            sent = asyncio.get_running_loop().create_future()
            if not self._unsent:
                # in the next turn of the event loop, after all requests of this turn
                asyncio.get_running_loop().call_soon(self._send_moment)
            self._unsent.append(((list(prompt_ids), sampling, seed), sent))
            reply, asked = await sent, self._process
            try:
                completion, process = await self._answer(reply)
            except PROCESS_LOST:  # its completion was lost on its way
                self._repeated_count += 1
                await asyncio.sleep(PING_S)
                continue
            self._note(process)
            self._repeated_count += process != asked
            return completion

    def _send_moment(self) -> None:
        requests = [each for each in self._unsent if not each[1].done()]
        self._unsent, number = [], next(self._moments)
        for place, (request, sent) in enumerate(requests):
            moment = Moment(self._process, number, place, len(requests))
            sent.set_result(self._actor.generate.remote(*request, self._state, moment))

    async def load(self, weights: Sequence[Any], version: int) -> None:
        """Load weights. The engine has no older ones afterwards, also in a new process."""
        self._state = dataclasses.replace(self._state, version=version, weights=tuple(weights))
        self.version = -1
        self._loading += 1
        try:
            _, self.version, process = await self._answer(self._actor.load.remote(self._state))
        finally:
            self._loading -= 1
        self._note(process)

    async def reset_cache(self) -> None:
        """Discard the engine's cached prefixes. A new process has none."""
        await self._answer(self._actor.reset_cache.remote(self._state))

    def take_metrics(self) -> dict[str, float]:
        """Return the counts of restarts and repeated requests since the last call, if not 0."""
        counts = {
            "rollout/replica_restarts": self._restart_count,
            "rollout/requests_repeated": self._repeated_count,
        }
        self._restart_count = self._repeated_count = 0
        return {name: count for name, count in counts.items() if count}

    async def _answer(self, reply: Any) -> Any:
        """Return the reply, and watch the process until then. Raises EngineLost."""
        self._waiting += 1
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            return await reply
        except ActorDiedError as error:
            raise EngineLost(f"{self.name} {self._why_lost}") from error
        except RayTaskError as error:
            raise remote_error(self.name, error) from None
        finally:
            self._waiting -= 1
            if not self._waiting and self._watcher is not None:
                self._watcher.cancel()
                self._watcher = None

    async def _watch(self) -> None:
        """Let Ray restart a process that is silent, and give up one that does not come back."""
        while self._seconds_left() > 0:
            try:
                process, version = await self._ping(self._seconds_left())
            except TimeoutError:
                if self._gone_since is None:
                    self._miss("no answer")
                    ray.kill(self._actor, no_restart=False)
            except ActorDiedError:
                return  # for good, as whoever waits is told too
            except PROCESS_LOST as error:
                self._miss(type(error).__name__)
                await asyncio.sleep(PING_S)
            else:
                if version >= 0:
                    self._note(process)
                elif process != self._process:
                    self._miss("another process")
        limit = f"{self._config.restart_timeout:g} s (cluster.restart_timeout)"
        self._why_lost = f"did not come back within {limit}"
        ray.kill(self._actor)

    def _seconds_left(self) -> float:
        """Return how long the process may be silent."""
        if self._gone_since is not None:
            return self._gone_since + self._config.restart_timeout - time.monotonic()
        if self._loading:
            return self._config.restart_timeout
        return self._config.reply_timeout

    async def _ping(self, limit: float) -> tuple[str, int]:
        ping = self._actor.ping.options(max_task_retries=0)
        reply = ping.remote(min(PING_S, self._config.reply_timeout / 2))
        excused = self._gone_since is None and not self._loading  # it may begin to load meanwhile
        return await wait_for_reply(
            asyncio.ensure_future(reply), limit, lambda: excused and self._loading > 0
        )

    def _miss(self, reason: str) -> None:
        if self._gone_since is None:
            self._gone_since = time.monotonic()
            LOG.warning("%s is gone (%s); waiting for Ray to restart it", self.name, reason)

    def _note(self, process: str) -> None:
        """Count a restart if another process than before has the engine."""
        if process == self._process:
            return
        self._miss("another process")
        assert self._gone_since is not None
        LOG.warning("%s is back after %.1f s", self.name, time.monotonic() - self._gone_since)
        self._process, self._gone_since = process, None
        self._restart_count += 1


async def wait_for_reply(
    reply: asyncio.Future[Any], limit: float, paused: Callable[[], bool] = lambda: False
) -> Any:
    """Return the result of `reply`. Raises TimeoutError if there is none after `limit` seconds.

    The limit is divided into REPLY_CHECKS checks. A blocked event loop costs one check, however
    long it is blocked, so a reply that arrived meanwhile is not lost. A check during which paused()
    is true does not count.
    """
    checks_left = REPLY_CHECKS
    try:
        while not reply.done():
            if checks_left == 0:
                raise TimeoutError
            await asyncio.wait((reply,), timeout=limit / REPLY_CHECKS)
            checks_left -= not paused()
        return reply.result()
    finally:
        reply.cancel()


def remote_error(name: str, error: RayTaskError) -> Exception:
    """Return the error that a method of process `name` raised, as an error of this process."""
    cause = error.cause
    if isinstance(cause, TrainingError | UsageError | RoutingError):
        return type(cause)(f"{name}: {cause}")
    return TrainingError(f"{name}: {type(cause).__name__}: {cause}")
