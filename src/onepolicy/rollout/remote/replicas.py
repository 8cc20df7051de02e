"""`Replicas`: engines in Ray's actors as one engine."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Protocol

from onepolicy.config import TrainingError
from onepolicy.interfaces import NamedWeights, NumericsContract, WeightSizes
from onepolicy.rollout.remote.broadcast import ReplicaBroadcast
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.fleet import Fleet, Member, MemberEngine
from onepolicy.sync.checksum import ChecksumAccumulator
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights
from onepolicy.types import Completion, Sampling


class Replica(MemberEngine, Protocol):
    """An engine that loads weights from a folder."""

    version: int

    async def load_files(
        self, written: WrittenWeights, shared: ReplicaBroadcast | None = None
    ) -> None:
        """Load the tensors, which have transformers' names.

        shared: a broadcast of them with this engine as one receiver. The engine reads no older
        files afterwards.
        """
        ...


class Replicas(Fleet[Replica]):
    """A RolloutEngine that spreads requests over several engines, by their first prompt alone.

    So siblings and later turns find their prefixes in one cache, and a repeated run sends the same
    requests to the same engines. An engine that is lost is so for good.
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
        super().__init__([Member(engine.name, engine) for engine in engines], math.inf)
        self.caps = dataclasses.replace(self.caps, contract=contract, sizes=sizes)
        self._files, self._broadcast = files, broadcast
        # versions that engines hold; they differ while weights are loaded
        self._oldest = self._newest = 0

    @property
    def names(self) -> list[str]:
        """Names of the engines that are not lost."""
        return [member.name for member in self._members]

    async def _generate_with(
        self, member: Member[Replica], prompt_ids: Sequence[int], sampling: Sampling, seed: int
    ) -> Completion:
        """Raise TrainingError if weights from before the request sampled it."""
        asked = self._oldest
        completion = await super()._generate_with(member, prompt_ids, sampling, seed)
        found = completion.version
        if len(found) and not asked <= int(found.min()) <= int(found.max()) <= self._newest:
            raise TrainingError(
                f"{member.name} answered a request of weight version {asked} with tokens of "
                f"versions {int(found.min())} to {int(found.max())}, while the newest is "
                f"{self._newest}"
            )
        return completion

    async def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load the weights into all engines. Each engine resumes its running requests with them."""
        key = secrets.token_bytes(32)
        checksums = ChecksumAccumulator(key)
        write = partial(
            self._files.write_version, checksums.add_each(weights), version, keep_older=True
        )
        # the event loop still serves engines with requests
        folder = await run_in_daemon_thread(write)
        written = WrittenWeights(str(folder), version, key, checksums.pop_all())
        self._placement.forget()
        self.version, self._newest, members = -1, version, self._members
        broadcast: AbstractAsyncContextManager[ReplicaBroadcast | None] = nullcontext()
        if self._broadcast is not None:
            broadcast = self._broadcast(written, len(members))
        async with broadcast as shared:

            async def load(_: int, engine: Replica) -> None:
                await engine.load_files(written, shared)
                if engine.version != version:
                    raise TrainingError(
                        f"{engine.name} holds weight version {engine.version} after loading "
                        f"{version}"
                    )

            await self._on_each(members, load)
        self._files.remove_older()
        self.version = self._oldest = version

    def _none_left(self) -> EngineLost:
        return EngineLost(f"{super()._none_left()}; `--resume` continues after the last checkpoint")
