"""An engine in a process of its own that is lost in the middle of a run: wait until it is back, give it the weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from onepolicy.build.components import Components
from onepolicy.config import RunConfig, ServerEngineConfig, TrainingError, UsageError
from onepolicy.interfaces import PersistentEngine
from onepolicy.sync.push import push_weights, reattach_engine

if TYPE_CHECKING:
    from onepolicy.rollout.servers.http import EngineLost

T = TypeVar("T")
LOG = logging.getLogger(__name__)
PATIENCE_S = 300.0
TIMES = 3  # that the same work may lose its engine
POLL_S = 1.0


async def do_nothing() -> None: ...


async def retry_on_engine_loss(
    parts: Components,
    work: Callable[[], Awaitable[T]],
    cancel_pending: Callable[[], Awaitable[None]] = do_nothing,
) -> T:
    """What `work` returns; done again, from its beginning, after an engine that it lost has come back.

    Nothing of what was sampled before counts: a server that was restarted unseen sampled from other weights. EngineLost
    if the engine does not come back within rollout.engine.recovery_timeout_s, or is lost again and again.

    cancel_pending: ends what else is being asked of the engine, before it is given the weights again.
    """
    engine, config = parts.engine, parts.config.rollout.engine
    patience = config.recovery_timeout_s if isinstance(config, ServerEngineConfig) else 0
    patience = PATIENCE_S if patience is None else patience
    if not isinstance(engine, PersistentEngine):  # several engines as one look after themselves
        return await work()
    from onepolicy.rollout.servers.http import EngineLost

    lost = 0
    while True:
        try:
            done = await work()
            await engine.confirm_weights()
            return done
        except EngineLost as error:
            lost += 1
            if lost > TIMES or not patience:
                raise
            LOG.warning("%s. Waiting up to %g s for it", str(error).split(". ")[0], patience)
            began = time.monotonic()
            await cancel_pending()
            await _back(parts, engine, error, began + patience)
            LOG.warning(
                "the engine is back after %.0f s and has the weights again",
                time.monotonic() - began,
            )


async def wait_for_server(config: RunConfig, say: Callable[[str], None]) -> None:
    """A resumed run may have lost its server together with its driver: give it as long to come back as in a run.

    Returns at the latest after rollout.engine.recovery_timeout_s and one attempt; the start says what is wrong with a server.
    """
    engine = config.rollout.engine
    if not isinstance(engine, ServerEngineConfig):
        return
    from onepolicy.rollout.servers.http import EngineUnreachable, make_clients

    patience = PATIENCE_S if engine.recovery_timeout_s is None else engine.recovery_timeout_s
    _, client = make_clients(engine, server="the server")
    end, said = time.monotonic() + patience, False
    with client.startup_errors():
        while True:
            try:
                return await client.get("/health")
            except EngineUnreachable as error:
                if time.monotonic() + POLL_S > end:
                    return
                if not said:
                    say(f"{str(error).split('. ')[0]}. Waiting up to {patience:g} s for it")
                said = True
                await asyncio.sleep(POLL_S)
            except UsageError:
                return  # somebody is there


async def _back(parts: Components, engine: PersistentEngine, lost: EngineLost, end: float) -> None:
    """Once it is there: is it fit, does its reload work? Then the learner's weights."""
    from onepolicy.rollout.servers.http import EngineLost, EngineUnreachable

    vocab = parts.learner.scorer.vocab_size
    while True:
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await engine.connect()
                await reattach_engine(engine, vocab=vocab)
            return await push_weights(parts.learner, *parts.samplers)
        except (EngineUnreachable, EngineLost, TimeoutError):
            if time.monotonic() + POLL_S > end:
                raise lost from None
            await asyncio.sleep(POLL_S)
        except UsageError as error:
            raise TrainingError(
                f"the engine came back as one this run cannot use: {error}"
            ) from error
