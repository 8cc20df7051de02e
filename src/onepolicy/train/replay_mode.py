"""The modes of replay.mode: which routes a forward of the trainer replays, and their metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.config import R2, RolloutReplay, SoftReplay, WeightsReplay
from onepolicy.config.replay import ReplayConfig
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.types import RoutingTrace, TokenBatch


class ReplayMode:
    """Mode off: the trainer routes every token itself."""

    replays_in_scoring = False  # False: only the update replays

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}  # arguments of `Routers.replay`

    def routes(self, micro: TokenBatch) -> RoutingTrace | None:
        """Return the routes to replay. None: the trainer routes every token itself."""
        return None

    def record_update_forward(self, handle: RouteRecorder | ReplayHandle | None) -> None:
        """Keep the measurements of a forward of the update."""

    def metrics(self) -> dict[str, float]:
        """Return means since the last call."""
        return {}

    def pop_counts(self) -> list[Tensor]:
        """Return and reset this rank's measurements; the driver passes each to `add_count`."""
        return []

    def add_count(self, count: Tensor) -> None: ...


class RolloutRoutes(ReplayMode):
    """Modes r3 and weights: replay the rollout's routes, in scoring and in the update."""

    replays_in_scoring = True

    def __init__(self, config: RolloutReplay) -> None:
        super().__init__()
        if isinstance(config, WeightsReplay):
            self.settings = {"weights": True}

    def routes(self, micro: TokenBatch) -> RoutingTrace | None:
        if micro.routing is None:
            raise RoutingError(
                "replay is on, but the batch has no routes; they were dropped after collect()"
            )
        return micro.routing


class SoftRoutes(RolloutRoutes):
    """Mode soft: replay the rollout's routes, except experts that the trainer finds too unlikely.

    It measures the fraction of experts that were replaced.
    """

    def __init__(self, config: SoftReplay) -> None:
        super().__init__(config)
        self.settings = {"soft": config.ratio}
        self._replaced: list[Tensor] = []  # [L] per forward

    def record_update_forward(self, handle: RouteRecorder | ReplayHandle | None) -> None:
        if isinstance(handle, ReplayHandle):
            self._replaced.append(handle.replaced_fraction())

    def metrics(self) -> dict[str, float]:
        replaced = self.pop_counts()
        if not replaced:
            return {}
        return {"train/soft_replaced": float(torch.stack(replaced).mean())}

    def pop_counts(self) -> list[Tensor]:
        counts, self._replaced = self._replaced, []
        return counts

    def add_count(self, count: Tensor) -> None:
        self._replaced.append(count)


class ScoringRoutes(ReplayMode):
    """Mode r2: the update replays the experts that scoring chose (GSPO, arXiv:2507.18071)."""

    def routes(self, micro: TokenBatch) -> RoutingTrace | None:
        assert micro.routing_native is not None, "r2 replays the routes that score() recorded"
        return micro.routing_native


def build_replay_mode(config: ReplayConfig) -> ReplayMode:
    """Build the mode of the section `replay`."""
    if isinstance(config, SoftReplay):
        return SoftRoutes(config)
    if isinstance(config, RolloutReplay):
        return RolloutRoutes(config)
    if isinstance(config, R2):
        return ScoringRoutes()
    return ReplayMode()
