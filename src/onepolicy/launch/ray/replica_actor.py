"""The process of a rollout replica under Ray.

Every worker imports this module before it is asked for anything. So torch and the engines are
imported when an engine is built.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.util import register_serializer

from onepolicy.launch.ray.rank_actor import process_info_json
from onepolicy.telemetry import disable_telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from onepolicy.interfaces import EngineCaps, RolloutEngine
    from onepolicy.types import Completion, Sampling

MEETING_TIMEOUT_S = 30.0
"""Seconds that requests wait for those of the same moment, which Ray brings within milliseconds."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The settings and the weights of an engine. Every request brings them.

    So a process that Ray has restarted, and whose requests Ray sends again, needs nothing else.
    """

    spec: Any  # reference to an EngineSpec
    threads: int
    version: int = 0
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
        self._process = uuid.uuid4().hex
        self._version = -1  # of the weights it has
        self._changing = asyncio.Lock()
        self._meetings: dict[int, dict[int, asyncio.Future[None]]] = {}

    async def process_info_json(self) -> str:
        return process_info_json()

    async def ping(self, seconds: float) -> tuple[str, int]:
        """Return the name of this process and the version that it has, -1 before it has any.

        seconds: until it answers. A process that ends meanwhile is noticed at once.
        """
        await asyncio.sleep(seconds)
        return self._process, self._version

    async def load(self, state: EngineState) -> tuple[EngineCaps, int, str]:
        """Return the engine's capabilities and version with this state, and this process's name."""
        engine = await self._engine_with(state)
        return engine.caps, engine.version, self._process

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
        return await engine.generate(prompt_ids, sampling, seed=seed), self._process

    async def reset_cache(self, state: EngineState) -> None:
        await (await self._engine_with(state)).reset_cache()

    async def _meet(self, moment: Moment) -> None:
        """Wait until all requests of a moment are here, then let them start in their order.

        A batch, and with it the last bits of a completion, is then that of an engine in the
        driver's process. After a loss Ray brings only those that were not answered.
        """
        if moment.process != self._process:
            return
        loop = asyncio.get_running_loop()
        met = self._meetings.setdefault(moment.number, {})
        here = met.setdefault(moment.place, loop.create_future())
        if len(met) == moment.size:
            loop.call_soon(self._let_start, moment.number)
        await asyncio.wait((here,), timeout=MEETING_TIMEOUT_S)
        self._meetings.pop(moment.number, None)

    def _let_start(self, number: int) -> None:
        for _, here in sorted(self._meetings.get(number, {}).items()):
            here.set_result(None)

    async def _engine_with(self, state: EngineState) -> RolloutEngine:
        """Return the engine with the weights of `state`, or newer ones."""
        if self._engine is None or self._version < state.version:
            async with self._changing:
                if self._engine is None:
                    self._engine = build_engine(await state.spec, state.threads)
                    self._version = min(state.version, 0)
                if self._version < state.version:
                    buckets = [await reference for reference in state.weights]
                    await self._engine.load_weights(tensors_of(buckets), state.version)
                    self._version = state.version
        return self._engine


def build_engine(spec: Any, threads: int) -> RolloutEngine:
    import torch

    from onepolicy.build import engines
    from onepolicy.models.load import parse_device

    parse_device(spec.device.type)  # which this machine must have
    # torch pickles uint16 tensors, which routes are, but cannot unpickle them
    register_serializer(torch.Tensor, serializer=bytes_of, deserializer=tensor_of)
    torch.set_num_threads(threads)
    return engines.build_engine(spec)


def bytes_of(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """Return a tensor's bytes as an array, its dtype and its shape."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy(), tensor.dtype, tuple(tensor.shape)


def tensor_of(parts: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    """Return the tensor of `bytes_of`."""
    import torch

    data, dtype, shape = parts
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def tensors_of(buckets: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `replicas.put_weights`. They belong to the engine."""
    import torch

    from onepolicy.sync.buckets import unflatten_bucket

    for forms, data in buckets:
        like = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in forms.items()
        }
        yield from unflatten_bucket(torch.from_numpy(data.copy()), like).items()
