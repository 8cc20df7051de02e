"""`Replicas`: one RolloutEngine made of several engines that share requests and weights."""

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
from onepolicy.interfaces import (
    EngineCaps,
    MetricsSource,
    NamedWeights,
    NumericsContract,
    WeightSizes,
)
from onepolicy.rollout.remote.broadcast import ReplicaBroadcast
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.sync.checksum import ChecksumAccumulator
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights
from onepolicy.types import Completion, Sampling

LOG = logging.getLogger(__name__)


class Replica(Protocol):
    """A RolloutEngine that loads weights from a folder."""

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
        """Load the tensors, which have transformers' names.

        shared: a broadcast of them with this engine as one receiver. The engine reads no older
        files afterwards.
        """
        ...


class Replicas:
    """A RolloutEngine that spreads requests over several engines.

    The first prompt of an episode chooses the engine. So siblings and later turns find their
    prefixes in one cache, and a repeated run sends the same requests to the same engines. If an
    engine is lost, the others take over its requests.
    """

    def __init__(
        self,
        engines: Sequence[Replica],
        files: WeightFiles,
        *,
        broadcast: Callable[[WrittenWeights, int], ReplicaBroadcast] | None = None,
        contract: NumericsContract | None = None,
        sizes: WeightSizes | None = None,
    ) -> None:
        """Combine the engines.

        files: writer of the weights, once for all engines. broadcast(written, receivers): sends
        these files to all engines; None: each engine reads them. contract (on-policy) and sizes
        (rollout.quant): of each engine.
        """
        assert engines
        self.version = 0
        self.adapter: str | None = None  # name of the LoRA adapter in the engines' weights
        self.caps = dataclasses.replace(
            common_caps([each.caps for each in engines]), contract=contract, sizes=sizes
        )
        self._engines = list(engines)  # without those that are lost
        self._files, self._broadcast = files, broadcast
        # versions that engines hold; they differ while weights are loaded
        self._oldest = self._newest = 0

    @property
    def names(self) -> list[str]:
        """Names of the engines that are not lost."""
        return [engine.name for engine in self._engines]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, seed: int
    ) -> Completion:
        """Sample with the engine that the episode's first prompt chooses.

        Raises TrainingError if weights from before the request sampled it, or if no engine is left.
        """
        asked, first_prompt = self._oldest, prompt_ids[: sampling.initial_prompt_len or None]
        while True:
            engine = choose_replica(self._engines, first_prompt)
            try:
                completion = await engine.generate(prompt_ids, sampling, seed=seed)
            except EngineLost as error:
                self._remove_engine(engine, error)
                continue
            found = completion.version
            if len(found) and not asked <= int(found.min()) <= int(found.max()) <= self._newest:
                raise TrainingError(
                    f"{engine.name} answered a request of weight version {asked} with tokens of "
                    f"versions {int(found.min())} to {int(found.max())}, while the newest is "
                    f"{self._newest}"
                )
            return dataclasses.replace(completion, adapter=self.adapter)

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load the weights into all engines. Each engine resumes its running requests with them."""
        key = secrets.token_bytes(32)
        checksums = ChecksumAccumulator(key)
        write = partial(
            self._files.write_version, checksums.add_each(weights), version, keep_older=True
        )
        folder = await run_in_daemon_thread(
            write
        )  # the event loop still serves engines with requests
        written = WrittenWeights(str(folder), version, key, checksums.pop_all())
        self.version, self._newest = -1, version

        async def load(engine: Replica, shared: ReplicaBroadcast | None) -> None:
            await engine.load_files(written, shared)
            if engine.version != version:
                raise TrainingError(
                    f"{engine.name} holds weight version {engine.version} after loading {version}"
                )

        if self._broadcast is None:
            await self._call_all(lambda engine: load(engine, None))
        else:
            async with self._broadcast(written, len(self._engines)) as shared:
                await self._call_all(lambda engine: load(engine, shared))
        self._files.remove_older()
        self.version = self._oldest = version

    async def reset_cache(self) -> None:
        await self._call_all(lambda engine: engine.reset_cache())

    def take_metrics(self) -> dict[str, float]:
        """Return the sums of the engines' metrics since the last call."""
        total: Counter[str] = Counter()
        for engine in self._engines:
            if isinstance(engine, MetricsSource):
                total.update(engine.take_metrics())
        return dict(total)

    async def _call_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Await call(engine) for all engines at once. Remove engines that are lost meanwhile."""
        engines = list(self._engines)
        results = await asyncio.gather(*map(call, engines), return_exceptions=True)
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._remove_engine(engine, result)
            elif isinstance(result, BaseException):
                raise result

    def _remove_engine(self, engine: Replica, error: EngineLost) -> None:
        """Remove a lost engine. Raise TrainingError if it was the last one."""
        if engine in self._engines:
            self._engines.remove(engine)
            LOG.warning("%s; %d replicas are left", error, len(self._engines))
        if not self._engines:
            raise TrainingError(
                f"no rollout replica is left: {error}; `--resume` continues after the last "
                "checkpoint"
            )


def choose_replica(engines: Sequence[Replica], first_prompt: Sequence[int]) -> Replica:
    """Return the engine of an episode by rendezvous hashing.

    If an engine is lost, only its own episodes move to other engines.
    """
    key = np.asarray(first_prompt, dtype=np.int64).tobytes()
    return max(
        engines,
        key=lambda engine: hashlib.blake2b(key + engine.name.encode(), digest_size=8).digest(),
    )


def common_caps(caps: Sequence[EngineCaps]) -> EngineCaps:
    """Return the capabilities that all engines have."""
    dtypes = {each.weights_dtype for each in caps}
    weights_dtype: str | None = None
    if len(dtypes) == 1:
        (weights_dtype,) = dtypes
    return EngineCaps(
        returns_routes=all(each.returns_routes for each in caps),
        max_len=min(each.max_len for each in caps),
        returns_combine_weights=all(each.returns_combine_weights for each in caps),
        top_logprobs=min(each.top_logprobs for each in caps),
        seeded=all(each.seeded for each in caps),
        weights_dtype=weights_dtype,
        takes_adapter=all(each.takes_adapter for each in caps),
        inexact_dtype=_coarsest({each.inexact_dtype for each in caps}),
    )


def _coarsest(dtypes: set[str | None]) -> str | None:
    """Return the dtype with the largest last places; None if there is none."""
    for dtype in ("bfloat16", "float32"):
        if dtype in dtypes:
            return dtype
    return None
