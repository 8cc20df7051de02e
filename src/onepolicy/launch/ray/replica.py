"""A rollout replica under Ray: its engine, and the requests that run in it."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import Any

import torch
from pydantic import TypeAdapter

from onepolicy.build import engines
from onepolicy.config import EngineConfig, ModelConfig, TrainingError
from onepolicy.config.quant import QuantConfig
from onepolicy.interfaces import RolloutEngine
from onepolicy.launch.ray.wire import GenerateRequest, decode_requests, encode_replies
from onepolicy.models.load import parse_device
from onepolicy.models.quant.size_report import SizeReport
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.broadcast import Receiver
from onepolicy.sync.checksum import ChecksumAccumulator, ChecksumTable, describe_difference
from onepolicy.sync.weight_files import read_weights
from onepolicy.types import Completion

WEIGHTS_POLL_S = 0.05
"""Seconds between two checks whether an engine has a complete set of weights again."""


class Replica:
    """An engine, the requests that run in it, and their replies."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Build the engine from the settings of `_RunActors.build_engine`, read from JSON."""
        self.engine = build_engine(settings)
        self._running: set[asyncio.Task[None]] = set()
        # Replies stay here until the driver acknowledges them.
        self._replies: dict[int, Completion | BaseException] = {}
        self._has_reply = asyncio.Event()

    async def drop_requests(self) -> None:
        """Stop all requests and forget their replies."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._replies.clear()

    def submit_requests(self, data: bytes) -> None:
        """Start the requests of one message together, in their order."""
        for number, request in decode_requests(data).items():
            task = asyncio.create_task(self._generate(number, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def collect_replies(self, timeout: float, acknowledged: list[int]) -> bytes:
        """Return all replies as soon as there is one, or none after `timeout` seconds.

        A reply is kept, and returned again, until it is in `acknowledged`, because a returned
        message can get lost.
        """
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
        checksums = ChecksumAccumulator(key)
        await self.engine.load_weights(checksums.add_each(read_weights(folder)), version)
        problem = describe_difference(sums, checksums.pop_all())
        if problem is not None:
            self.engine.version = -1  # the engine refuses all requests
            raise TrainingError(
                f"cluster.sync_dir: weights of version {version} as read from {folder}: {problem}"
            )
        return self.engine.version

    async def receive_weights(self, invitation: str, rank: int, version: int) -> int:
        """Receive the weights of a sync.broadcast.Sender as `rank`. Return their version."""
        with Receiver(invitation, rank, version=version) as weights:
            await self.engine.load_weights(weights, version)
        return self.engine.version

    async def _generate(self, number: int, request: GenerateRequest) -> None:
        prompt, engine = request.prompt_ids.tolist(), self.engine
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

    def describe(self) -> dict[str, Any]:
        """Return the properties that `_RunActors.build_engine` reads, for JSON."""
        caps = self.engine.caps
        assert caps.sizes is None or isinstance(caps.sizes, SizeReport)
        description: dict[str, Any] = {
            "caps": dataclasses.asdict(dataclasses.replace(caps, contract=None, sizes=None)),
            "contract": None,
            "sizes": None,
        }
        if caps.contract is not None:
            description["contract"] = dataclasses.asdict(caps.contract)
        if caps.sizes is not None:
            parts = [dataclasses.asdict(part) for part in caps.sizes.parts]
            description["sizes"] = [parts, caps.sizes.method]
        return description


def build_engine(settings: dict[str, Any]) -> RolloutEngine:
    """Build an engine from the settings of `_RunActors.build_engine`, read from JSON."""
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
