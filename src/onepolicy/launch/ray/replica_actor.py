"""The process of a rollout replica under Ray.

Every worker imports this module before it is asked for anything. So torch and the engines
(tensors.py) are imported when an engine is built.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from onepolicy.launch.ray.rank_actor import process_info_json
from onepolicy.telemetry import disable_telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onepolicy.interfaces import EngineCaps, RolloutEngine
    from onepolicy.types import Completion, Sampling

MEETING_TIMEOUT_S = 5.0
"""Seconds that requests wait for those of the same moment, which Ray brings within milliseconds."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The settings and the weights of an engine. Every request brings them.

    So a process that Ray has restarted, and whose requests Ray sends again, needs nothing else.
    """

    spec: Any  # reference to an EngineSpec
    threads: int
    update: int = 0  # number of the load that gave the weights; 0: those it is built with
    version: int = 0  # of the weights, which several loads may give
    weights: tuple[Any, ...] = ()  # references to (dtype and shape by name, bytes as an array)


class Moment(NamedTuple):
    """The place of a request among those that the driver sent at the same time."""

    process: str  # that they were sent to
    number: int
    place: int
    size: int


class ReplicaProcess:
    """A Ray actor with a rollout engine."""

    def __init__(self) -> None:
        disable_telemetry()  # this environment comes from Ray, which somebody else may have started
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._engine: RolloutEngine | None = None
        self._name = uuid.uuid4().hex
        self._update = -1  # of the state that the engine has
        self._changing, self._changes = asyncio.Lock(), set[asyncio.Task[None]]()
        self._meetings: dict[int, dict[int, asyncio.Future[None]]] = {}
        self._last_met = -1

    async def process_info_json(self) -> str:
        return process_info_json()

    async def ping(self, seconds: float) -> tuple[str, bool]:
        """Return the name of this process, and whether it has an engine with weights.

        seconds: until it answers, if it has. A process that ends meanwhile is noticed at once.
        """
        if self._update >= 0:
            await asyncio.sleep(seconds)
        return self._name, self._update >= 0

    async def load(self, state: EngineState) -> tuple[EngineCaps, int, str]:
        """Return the engine's capabilities and version with this state, and this process's name."""
        engine = await self._engine_with(state)
        return engine.caps, engine.version, self._name

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        state: EngineState,
        moment: Moment,
    ) -> tuple[Completion, str]:
        """Return a completion and the name of this process."""
        await self._meet(moment)
        engine = await self._engine_with(state)
        return await engine.generate(prompt_ids, sampling, seed=seed), self._name

    async def reset_cache(self, state: EngineState) -> None:
        await (await self._engine_with(state)).reset_cache()

    async def _meet(self, moment: Moment) -> None:
        """Wait until all requests of a moment are here, then let them start in their order.

        A batch, and with it the last bits of a completion, is then that of an engine in the
        driver's process. Of a moment that was sent to a lost process or has started, Ray brings
        only what was not answered: it waits for nobody.
        """
        number = moment.number
        has_started = number <= self._last_met and number not in self._meetings
        if moment.process != self._name or has_started:
            return
        loop = asyncio.get_running_loop()
        met = self._meetings.setdefault(number, {})
        here = met.setdefault(moment.place, loop.create_future())
        if len(met) == moment.size:
            loop.call_soon(self._let_start, number)  # once the last of them waits as well
        await asyncio.wait((here,), timeout=MEETING_TIMEOUT_S)
        self._let_start(number)

    def _let_start(self, number: int) -> None:
        self._last_met = max(self._last_met, number)
        for _, here in sorted(self._meetings.pop(number, {}).items()):
            here.set_result(None)

    async def _engine_with(self, state: EngineState) -> RolloutEngine:
        """Return the engine with the weights of `state`, or newer ones."""
        if self._update < state.update:
            # a task of its own: the end of a request that is given up must not end a load
            change = asyncio.create_task(self._change(state))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)
            await asyncio.shield(change)
        assert self._engine is not None
        return self._engine

    async def _change(self, state: EngineState) -> None:
        async with self._changing:
            if self._update >= state.update:
                return
            from onepolicy.launch.ray import tensors

            if self._engine is None:
                spec = await state.spec  # meanwhile this process says that it is not ready
                self._engine = tensors.build_engine(spec, state.threads)
            if state.update:
                buckets = [await reference for reference in state.weights]
                await self._engine.load_weights(tensors.from_buckets(buckets), state.version)
            self._update = state.update
