"""Several replicas as one engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from onepolicy.config import TrainingError
from onepolicy.interfaces import NamedWeights
from onepolicy.launch.ray.tensors import put_weights
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.fleet import Fleet, Member, MemberEngine
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.types import Completion, Sampling


class Replica(MemberEngine, Protocol):
    """An engine that loads weights from references that `put` of `Replicas` returned."""

    version: int

    async def load(self, weights: Sequence[Any], version: int) -> None: ...


class Replicas(Fleet[Replica]):
    """A RolloutEngine that spreads requests over several engines, by their first prompt alone.

    So siblings and later turns find their prefixes in one cache, and a repeated run sends the same
    requests to the same engines. An engine that is lost is so for good.
    """

    def __init__(self, engines: Sequence[Replica], put: Callable[[Any], Any]) -> None:
        """Combine the engines. put: stores a value where all of them read it; a reference to it."""
        super().__init__([Member(engine.name, engine) for engine in engines], math.inf)
        # all are built from the same settings, so one's contract is as good as any
        self.caps = dataclasses.replace(self.caps, contract=engines[0].caps.contract)
        # versions that engines hold; they differ while weights are loaded
        self._oldest = self._newest = 0
        self._put = put

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
        # in a thread, because the event loop still serves engines with requests
        stored = await run_in_daemon_thread(partial(put_weights, weights, self._put))
        self._placement.forget()
        self.version, self._newest = -1, version

        async def load(_: int, engine: Replica) -> None:
            await engine.load(stored, version)
            if engine.version != version:
                raise TrainingError(
                    f"{engine.name} holds weight version {engine.version} after loading {version}"
                )

        await self._on_each(self._members, load)
        self.version = self._oldest = version

    def _none_left(self) -> EngineLost:
        return EngineLost(f"{super()._none_left()}; `--resume` continues after the last checkpoint")
