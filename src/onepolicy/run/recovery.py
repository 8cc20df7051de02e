"""Recovery from a lost engine: wait until it is back, push the weights, repeat the work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from onepolicy.build.components import Components
from onepolicy.config import (
    RunConfig,
    ServerEngineConfig,
    ServiceUnavailable,
    TrainingError,
    UsageError,
)
from onepolicy.interfaces import RecoverableEngine
from onepolicy.rollout.remote.addresses import server_configs
from onepolicy.rollout.remote.client import EngineLost, EngineUnreachable, make_clients
from onepolicy.sync.push import push_weights

T = TypeVar("T")
LOG = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 300.0
MAX_LOSSES = 3  # of the engine, while one piece of work is repeated
POLL_S = 1.0


class Recovering:
    """A run's engine in other processes, which gets the learner's weights again after a loss."""

    def __init__(self, components: Components) -> None:
        assert isinstance(components.engine, RecoverableEngine)
        self._engine, self._samplers = components.engine, components.samplers
        self._learner = components.learner
        self._timeout = _recovery_timeout(components.config)

    async def run(
        self,
        work: Callable[[], Awaitable[T]],
        cancel_pending: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Return the result of `work`. Repeat it from its start if the engine is lost and is back.

        Discard every earlier sample. If the server restarted unnoticed, they came from different
        weights. cancel_pending: ends other requests to the engine before it gets the weights again.

        Raises EngineLost if the engine does not come back within
        rollout.engine.recovery_timeout_s, or is lost more than MAX_LOSSES times.
        """
        losses = 0
        while True:
            try:
                result = await work()
                await self._engine.confirm_weights()
                return result
            except EngineLost as error:
                losses += 1
                if losses > MAX_LOSSES or not self._timeout:
                    raise
                LOG.warning("%s. Waiting up to %g s for it", _first_sentence(error), self._timeout)
                start = time.monotonic()
                if cancel_pending is not None:
                    await cancel_pending()
                await self._reconnect(error, start + self._timeout)
                LOG.warning(
                    "the engine is back after %.0f s and has the weights again",
                    time.monotonic() - start,
                )

    async def _reconnect(self, lost: EngineLost, deadline: float) -> None:
        """Wait for the engine, check it, and push the learner's weights.

        Raises EngineLost with both reasons if it is not back by `deadline`, and TrainingError if it
        does not fit this run.
        """
        problem: Exception = TrainingError("its connection and reload took longer than that")
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._engine.come_back()
                await push_weights(self._learner, *self._samplers)
                return
            except (EngineUnreachable, EngineLost, TimeoutError) as error:
                if not isinstance(error, TimeoutError):
                    problem = error
                if time.monotonic() + POLL_S > deadline:
                    raise EngineLost(
                        f"{lost}. It was not back in time: {_first_sentence(problem)}"
                    ) from problem
                await asyncio.sleep(POLL_S)
            except UsageError as error:
                raise TrainingError(
                    f"the engine is back, but this run cannot use it: {error}"
                ) from error


def _recovery_timeout(config: RunConfig) -> float:
    """Return the seconds to wait for a lost engine. 0 unless the engine is a server."""
    engine = config.rollout.engine
    if not isinstance(engine, ServerEngineConfig):
        return 0.0
    if engine.recovery_timeout_s is None:
        return DEFAULT_TIMEOUT_S
    return engine.recovery_timeout_s


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0]


async def wait_for_server(config: RunConfig, note: Callable[[str], None]) -> None:
    """Wait until the engine's server answers, before a run is resumed.

    The server may have been lost together with the driver, so it gets as much time to come back as
    within a run. This returns at the latest after rollout.engine.recovery_timeout_s and one
    attempt. It raises nothing: the run's start reports a server that does not answer.
    """
    engine = config.rollout.engine
    assert isinstance(engine, ServerEngineConfig)
    timeout = _recovery_timeout(config)
    deadline, noted = time.monotonic() + timeout, False
    while True:
        try:
            return await _ask_any(server_configs(engine))
        except ServiceUnavailable as error:
            if time.monotonic() + POLL_S > deadline:
                return
            if not noted:
                note(f"{_first_sentence(error)}. Waiting up to {timeout:g} s for it")
            noted = True
            await asyncio.sleep(POLL_S)
        except UsageError:
            return  # a server answers


async def _ask_any(servers: Sequence[ServerEngineConfig]) -> None:
    """Ask all servers at once. Raises EngineUnreachable if none answers."""
    clients = [make_clients(server, server="the server")[1] for server in servers]
    if not any(await asyncio.gather(*(client.answers() for client in clients))):
        urls = ", ".join(client.url for client in clients)
        raise EngineUnreachable(f"rollout.engine.url: no answer from {urls}")
