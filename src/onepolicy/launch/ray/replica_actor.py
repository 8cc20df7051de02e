"""What a rollout replica's process does: an engine of its own, asked in messages.

Imported by every worker before its settings are known, so torch and the engines are imported when an engine is built.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from onepolicy.launch.ray.rank_actor import process_info_json
from onepolicy.no_statistics import turn_off

if TYPE_CHECKING:
    from onepolicy.interfaces import RolloutEngine
    from onepolicy.launch.ray.wire import GenerateRequest
    from onepolicy.sync.checksum import Sums
    from onepolicy.types import Completion


WEIGHTS_POLL_S = 0.05
"""Seconds between two looks at whether an engine has whole weights again."""


class NotBuilt(Exception):
    """This process was restarted and has no engine yet, or was built again since."""


class ReplicaProcess:
    """A Ray actor. Ray starts it anew when its process dies; it then knows nothing, and is built again."""

    def __init__(self) -> None:
        turn_off()  # the worker's environment is that of a Ray which somebody else may have started
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._engine: RolloutEngine | None = None
        self._incarnation = 0
        self._running: set[asyncio.Task[None]] = set()
        self._done: dict[
            int, Completion | BaseException
        ] = {}  # until the driver says that it has them
        self._some = asyncio.Event()

    async def process_info_json(self) -> str:
        return process_info_json()

    async def build(self, text: str, life: int) -> str:
        """With the model's own weights. Asked again, it keeps its engine and drops what it was doing.

        life: the driver counts them up; what comes under another one from now on was sent earlier, and is refused.
        """
        if life < self._incarnation:
            raise NotBuilt
        self._incarnation = life
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()
        self._done.clear()
        if self._engine is None:
            self._engine = build_engine(json.loads(text))
        return json.dumps(description(self._engine))

    async def submit(self, life: int, data: bytes) -> None:
        """Requests that meet in one message start together, in their order."""
        from onepolicy.launch.ray.wire import decode_requests

        engine = self._of(life)
        for number, request in decode_requests(data).items():
            task = asyncio.create_task(self._run(engine, number, request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def collect(self, life: int, limit: float, taken: list[int]) -> bytes:
        """All answers there are, as soon as there is one, but after `limit` seconds at the latest.

        They stay here until they are in `taken`: nobody can say whether what is returned arrives.
        """
        from onepolicy.launch.ray.wire import encode_replies

        self._of(life)
        for number in taken:
            self._done.pop(number, None)
        if not self._done:
            self._some.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    await self._some.wait()
        return encode_replies(self._done)

    async def load(self, folder: str, version: int, key: bytes, sums: Sums) -> int:
        """Files that this process sees, too, whose checksums with `key` are `sums`. The version it holds afterwards."""
        from onepolicy.config import TrainingError
        from onepolicy.sync.checksum import Checksums, difference
        from onepolicy.sync.weight_files import read_weights

        checksums = Checksums(key)
        await self._built.load_weights(checksums.passing(read_weights(folder)), version)
        if (problem := difference(sums, checksums.take())) is not None:
            self._built.version = -1  # it answers nothing
            raise TrainingError(
                f"cluster.shared_dir: weights of version {version} as read from {folder}: {problem}"
            )
        return self._built.version

    async def receive(self, invitation: str, rank: int, version: int) -> int:
        """What a sync.broadcast.Sender sends to this rank. Returns the version it holds afterwards."""
        from onepolicy.sync.broadcast import Receiver

        engine = self._built
        with Receiver(invitation, rank, version=version) as weights:
            await engine.load_weights(weights, version)
        return engine.version

    async def reset_cache(self) -> None:
        await self._built.reset_cache()

    def _of(self, life: int) -> RolloutEngine:
        if life != self._incarnation:
            raise NotBuilt
        return self._built

    @property
    def _built(self) -> RolloutEngine:
        if self._engine is None:
            raise NotBuilt
        return self._engine

    async def _run(self, engine: RolloutEngine, number: int, request: GenerateRequest) -> None:
        prompt = request.prompt_ids.tolist()
        while True:
            asked = engine.generate(prompt, request.sampling, seed=request.seed)
            (answer,) = await asyncio.gather(asked, return_exceptions=True)
            if not isinstance(answer, Exception) or engine.version >= 0:
                break
            while (
                engine.version < 0
            ):  # a broadcast broke off half-way; the weights are sent once more, alone
                await asyncio.sleep(WEIGHTS_POLL_S)
        self._done[number] = answer
        self._some.set()


def description(engine: RolloutEngine) -> dict[str, Any]:
    """What cluster.hosts wants to know of an engine, for JSON."""
    from onepolicy.models.quant.size_report import SizeReport

    contract, sizes = engine.caps.contract, engine.caps.sizes
    assert sizes is None or isinstance(sizes, SizeReport)
    return {
        "caps": dataclasses.asdict(dataclasses.replace(engine.caps, contract=None, sizes=None)),
        "contract": None if contract is None else dataclasses.asdict(contract),
        "sizes": None
        if sizes is None
        else [[dataclasses.asdict(part) for part in sizes.parts], sizes.method],
    }


def build_engine(settings: dict[str, Any]) -> RolloutEngine:
    """settings: what cluster.hosts sends, from JSON."""
    import torch
    from pydantic import TypeAdapter

    from onepolicy.build import engines
    from onepolicy.config import EngineConfig, ModelConfig
    from onepolicy.config.quant import QuantConfig
    from onepolicy.models.load import parse_device
    from onepolicy.replay.checks import RouteSpec
    from onepolicy.rollout.spec import EngineSpec

    torch.set_num_threads(settings["threads"])
    routes = settings["routes"]
    return engines.build_engine(
        EngineSpec(
            ModelConfig.model_validate(settings["model"]),
            TypeAdapter(EngineConfig).validate_python(settings["engine"]),
            parse_device("cuda" if settings["cuda"] else "cpu"),
            settings["max_len"],
            routes=None
            if routes is None
            else RouteSpec(**{**routes, "layers": tuple(routes["layers"])}),
            combine_weights=settings["combine_weights"],
            numerics=settings["numerics"],
            quant=TypeAdapter(QuantConfig).validate_python(settings["quant"]),
        )
    )
