"""`Replicas`: one RolloutEngine made of several of a kind, which share the requests and all follow the weights."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from onepolicy.config import TrainingError
from onepolicy.interfaces import EngineCaps, MetricsSource, NamedWeights, WeightSizes
from onepolicy.rollout.fleet.broadcast import ReplicaBroadcast
from onepolicy.rollout.servers.http import EngineLost
from onepolicy.sync.checksum import ChecksumAccumulator
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights
from onepolicy.types import Completion, NumericsContract, Sampling

LOG = logging.getLogger(__name__)


class Replica(Protocol):
    """A RolloutEngine that takes weights over from a folder."""

    name: str
    caps: EngineCaps
    version: int

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion: ...

    async def reset_cache(self) -> None: ...

    async def load_files(
        self, written: WrittenWeights, shared: ReplicaBroadcast | None = None
    ) -> None:
        """Tensors under transformers' names in memory. shared: a broadcast of them, of which this is one receiver.
        Afterwards it reads older files no more."""
        ...


class Replicas:
    """A request's engine is a function of the first prompt of its episode: siblings and later turns find their prefixes
    in one cache, and a repeated run asks the same engines. An engine that is lost leaves its requests to the others."""

    def __init__(
        self,
        engines: Sequence[Replica],
        files: WeightFiles,
        *,
        broadcast: Callable[[WrittenWeights, int], ReplicaBroadcast] | None = None,
        contract: NumericsContract | None = None,
        sizes: WeightSizes | None = None,
    ) -> None:
        """files: where the weights are written, once for all engines. broadcast(written, receivers): of these files to
        all engines; None: each looks after itself. contract (on-policy), sizes (rollout.quant): of each."""
        assert engines
        self.version = 0
        self.caps = dataclasses.replace(
            common_caps([each.caps for each in engines]), contract=contract, sizes=sizes
        )
        self._living = list(engines)
        self._files, self._broadcast = files, broadcast
        self._oldest = self._newest = (
            0  # versions that engines hold; they differ while weights are loaded
        )

    @property
    def names(self) -> list[str]:
        """Of the engines that are left."""
        return [engine.name for engine in self._living]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """TrainingError if the completion was sampled by weights from before the request, or if no engine is left."""
        asked, root = self._oldest, prompt_ids[: sampling.initial_prompt_len or None]
        while True:
            engine = choose_replica(self._living, root)
            try:
                completion = await engine.generate(prompt_ids, sampling, seed=seed)
            except EngineLost as error:
                self._remove(engine, error)
                continue
            found = completion.version
            if len(found) and not asked <= int(found.min()) <= int(found.max()) <= self._newest:
                raise TrainingError(
                    f"{engine.name} answered a request of weight version {asked} with tokens of versions "
                    f"{int(found.min())} to {int(found.max())}, while the newest is {self._newest}"
                )
            return completion

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Requests that are running go on with them, each when its engine has them."""
        checksums = ChecksumAccumulator(key := secrets.token_bytes(32))
        write = partial(
            self._files.write_version, checksums.add_each(weights), version, keep_older=True
        )
        folder = await run_in_daemon_thread(
            write
        )  # engines that have requests want to be heard meanwhile
        written = WrittenWeights(str(folder), version, key, checksums.pop_all())
        self.version, self._newest = -1, version

        async def load(engine: Replica, shared: ReplicaBroadcast | None) -> None:
            await engine.load_files(written, shared)
            if engine.version != version:
                raise TrainingError(
                    f"{engine.name} holds weight version {engine.version} after loading {version}"
                )

        if self._broadcast is None:
            await self._on_all(lambda engine: load(engine, None))
        else:
            async with self._broadcast(written, len(self._living)) as shared:
                await self._on_all(lambda engine: load(engine, shared))
        self._files.remove_older()
        self.version = self._oldest = version

    async def reset_cache(self) -> None:
        await self._on_all(lambda engine: engine.reset_cache())

    def take_metrics(self) -> dict[str, float]:
        """Sums over the engines."""
        total: Counter[str] = Counter()
        for engine in self._living:
            if isinstance(engine, MetricsSource):
                total.update(engine.take_metrics())
        return dict(total)

    async def _on_all(self, act: Callable[[Replica], Awaitable[None]]) -> None:
        """At once; an engine that is lost meanwhile is left out."""
        engines = list(self._living)
        results = await asyncio.gather(*(act(engine) for engine in engines), return_exceptions=True)
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._remove(engine, result)
            elif isinstance(result, BaseException):
                raise result

    def _remove(self, engine: Replica, error: EngineLost) -> None:
        """TrainingError if it was the last one."""
        if engine in self._living:
            self._living.remove(engine)
            LOG.warning("%s; %d replicas are left", error, len(self._living))
        if not self._living:
            raise TrainingError(
                f"no rollout replica is left: {error}; `--resume` continues after the last checkpoint"
            )


def choose_replica(engines: Sequence[Replica], root: Sequence[int]) -> Replica:
    """Rendezvous hashing: what another engine's end moves are only its own requests."""
    key = np.asarray(root, dtype=np.int64).tobytes()
    return max(
        engines,
        key=lambda engine: hashlib.blake2b(key + engine.name.encode(), digest_size=8).digest(),
    )


def common_caps(caps: Sequence[EngineCaps]) -> EngineCaps:
    """What all of them can do."""
    return EngineCaps(
        returns_routes=all(each.returns_routes for each in caps),
        max_len=min(each.max_len for each in caps),
        returns_combine_weights=all(each.returns_combine_weights for each in caps),
        top_logprobs=min(each.top_logprobs for each in caps),
        seeded=all(each.seeded for each in caps),
    )
