"""The process of a rollout replica under Ray, which handles the driver's messages.

Every worker imports this module before its settings are known. So torch and the engines are
imported when an engine is built (replica.py).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from onepolicy.launch.ray.rank_actor import process_info_json
from onepolicy.telemetry import disable_telemetry

if TYPE_CHECKING:
    from onepolicy.launch.ray.replica import Replica
    from onepolicy.sync.checksum import ChecksumTable


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
        self._replica: Replica | None = None
        self._incarnation = 0

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
        if self._replica is None:
            from onepolicy.launch.ray.replica import Replica

            self._replica = Replica(json.loads(settings))
        await self._replica.drop_requests()
        return json.dumps(self._replica.describe())

    async def submit_requests(self, incarnation: int, data: bytes) -> None:
        self._replica_of(incarnation).submit_requests(data)

    async def collect_replies(
        self, incarnation: int, timeout: float, acknowledged: list[int]
    ) -> bytes:
        return await self._replica_of(incarnation).collect_replies(timeout, acknowledged)

    async def load_weight_files(
        self, folder: str, version: int, key: bytes, sums: ChecksumTable
    ) -> int:
        return await self._built.load_weight_files(folder, version, key, sums)

    async def receive_weights(self, invitation: str, rank: int, version: int) -> int:
        return await self._built.receive_weights(invitation, rank, version)

    async def reset_cache(self) -> None:
        await self._built.engine.reset_cache()

    def _replica_of(self, incarnation: int) -> Replica:
        if incarnation != self._incarnation:
            raise NotBuilt
        return self._built

    @property
    def _built(self) -> Replica:
        if self._replica is None:
            raise NotBuilt
        return self._replica
