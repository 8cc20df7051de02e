"""The process of a rollout replica under Ray: it has an engine and handles the driver's messages.

Every worker imports this module before its settings are known. So torch and the engines are
imported when an engine is built.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from onepolicy.launch.ray.rank_actor import process_info_json
from onepolicy.telemetry import disable_telemetry

if TYPE_CHECKING:
    from onepolicy.interfaces import RolloutEngine
    from onepolicy.launch.ray.wire import GenerateRequest
    from onepolicy.sync.checksum import ChecksumTable
    from onepolicy.types import Completion


WEIGHTS_POLL_S = 0.05
"""Seconds between two checks whether an engine has a complete set of weights again."""


class NotBuilt(Exception):
    """An error of a process that has no engine yet, or was built again after the message."""


class ReplicaProcess:
    """A Ray actor with a rollout engine.

    Ray restarts it when its process dies; the driver then builds it again.
    """

    def __init__(self) -> None:
        disable_telemetry()  # this environment comes from Ray, which somebody else may have started
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._engine: RolloutEngine | None = None
        self._incarnation = 0
        self._running: set[asyncio.Task[None]] = set()
        # Replies stay here until the driver acknowledges them.
        self._replies: dict[int, Completion | BaseException] = {}
        self._has_reply = asyncio.Event()

    async def process_info_json(self) -> str:
        return process_info_json()

    async def build(self, settings: str, incarnation: int) -> str:
        """Build the engine with the model's own weights and return its description as JSON.

        If there is an engine already, keep it and drop its requests. incarnation: the driver's
        counter of builds. A later message with another number was sent before this build. It raises
        NotBuilt.
        """
        if incarnation < self._incarnation:
            raise NotBuilt
        self._incarnation = incarnation
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._replies.clear()
        if self._engine is None:
            self._engine = build_engine(json.loads(settings))
        return json.dumps(describe_engine(self._engine))

    async def submit_requests(self, incarnation: int, data: bytes) -> None:
        """Start the requests of one message together, in their order."""
        from onepolicy.launch.ray.wire import decode_requests

        engine = self._engine_of(incarnation)
        for number, request in decode_requests(data).items():
            task = asyncio.create_task(self._generate(engine, number, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def collect_replies(
        self, incarnation: int, timeout: float, acknowledged: list[int]
    ) -> bytes:
        """Return all replies as soon as there is one, or none after `timeout` seconds.

        A reply is kept, and returned again, until it is in `acknowledged`, because a returned
        message can get lost.
        """
        from onepolicy.launch.ray.wire import encode_replies

        self._engine_of(incarnation)
        for number in acknowledged:
            self._replies.pop(number, None)
        if not self._replies:
            self._has_reply.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._has_reply.wait()
        return encode_replies(self._replies)

    async def load_weight_files(
        self, folder: str, version: int, key: bytes, sums: ChecksumTable
    ) -> int:
        """Load weights from files that this process can read, and return their version.

        sums: checksums of the tensors under `key`. Raises TrainingError if the files have others.
        """
        from onepolicy.config import TrainingError
        from onepolicy.sync.checksum import ChecksumAccumulator, describe_difference
        from onepolicy.sync.weight_files import read_weights

        engine = self._built_engine
        checksums = ChecksumAccumulator(key)
        await engine.load_weights(checksums.add_each(read_weights(folder)), version)
        problem = describe_difference(sums, checksums.pop_all())
        if problem is not None:
            engine.version = -1  # the engine refuses all requests
            raise TrainingError(
                f"cluster.sync_dir: weights of version {version} as read from {folder}: {problem}"
            )
        return engine.version

    async def receive_weights(self, invitation: str, rank: int, version: int) -> int:
        """Receive the weights of a sync.broadcast.Sender as `rank`. Return their version."""
        from onepolicy.sync.broadcast import Receiver

        engine = self._built_engine
        with Receiver(invitation, rank, version=version) as weights:
            await engine.load_weights(weights, version)
        return engine.version

    async def reset_cache(self) -> None:
        await self._built_engine.reset_cache()

    def _engine_of(self, incarnation: int) -> RolloutEngine:
        if incarnation != self._incarnation:
            raise NotBuilt
        return self._built_engine

    @property
    def _built_engine(self) -> RolloutEngine:
        if self._engine is None:
            raise NotBuilt
        return self._engine

    async def _generate(self, engine: RolloutEngine, number: int, request: GenerateRequest) -> None:
        prompt = request.prompt_ids.tolist()
        while True:
            reply = engine.generate(prompt, request.sampling, seed=request.seed)
            (result,) = await asyncio.gather(reply, return_exceptions=True)
            if not isinstance(result, Exception) or engine.version >= 0:
                break
            # A broadcast broke off, so the engine has no complete weights. The driver sends them to
            # this replica again.
            while engine.version < 0:
                await asyncio.sleep(WEIGHTS_POLL_S)
        self._replies[number] = result
        self._has_reply.set()


def describe_engine(engine: RolloutEngine) -> dict[str, Any]:
    """Return the properties that `_RunActors.build_engine` reads, for JSON."""
    from onepolicy.models.quant.size_report import SizeReport

    contract, sizes = engine.caps.contract, engine.caps.sizes
    assert sizes is None or isinstance(sizes, SizeReport)
    description: dict[str, Any] = {
        "caps": dataclasses.asdict(dataclasses.replace(engine.caps, contract=None, sizes=None)),
        "contract": None,
        "sizes": None,
    }
    if contract is not None:
        description["contract"] = dataclasses.asdict(contract)
    if sizes is not None:
        description["sizes"] = [[dataclasses.asdict(part) for part in sizes.parts], sizes.method]
    return description


def build_engine(settings: dict[str, Any]) -> RolloutEngine:
    """Build an engine from the settings of `_RunActors.build_engine`, read from JSON."""
    import torch
    from pydantic import TypeAdapter

    from onepolicy.build import engines
    from onepolicy.config import EngineConfig, ModelConfig
    from onepolicy.config.quant import QuantConfig
    from onepolicy.models.load import parse_device
    from onepolicy.replay.checks import RouteSpec
    from onepolicy.rollout.spec import EngineSpec

    torch.set_num_threads(settings["threads"])
    device = "cuda" if settings["cuda"] else "cpu"
    routes = settings["routes"]
    if routes is not None:
        routes = RouteSpec(**{**routes, "layers": tuple(routes["layers"])})
    return engines.build_engine(
        EngineSpec(
            ModelConfig.model_validate(settings["model"]),
            TypeAdapter(EngineConfig).validate_python(settings["engine"]),
            parse_device(device),
            settings["max_len"],
            route_spec=routes,
            combine_weights=settings["combine_weights"],
            numerics=settings["numerics"],
            quant=TypeAdapter(QuantConfig).validate_python(settings["quant"]),
            gpu_share=settings["gpu_share"],
        )
    )
