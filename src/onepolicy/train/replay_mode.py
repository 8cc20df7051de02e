"""What each replay.mode replays in a forward of the trainer, and what it counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.config import R2, FromRollout, SoftReplay, WeightsReplay
from onepolicy.config.objective import ReplayConfig
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.types import RoutingTrace, TokenBatch


class ReplayMode:
    """off: the trainer routes every token itself."""

    in_scoring = False  # whether scoring replays too, or the update alone

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}  # of `Routers.replay`

    def routes(self, micro: TokenBatch) -> RoutingTrace | None:
        """The routes to replay; None: the trainer routes every token itself."""
        return None

    def saw(self, tape: RouteRecorder | ReplayHandle | None) -> None:
        """Take note of a forward that the update is made of."""

    def metrics(self) -> dict[str, float]:
        """Means since the last call."""
        return {}

    def take(self) -> list[Tensor]:
        """What was noted since the last call, for the driver of several ranks; `add` takes it there."""
        return []

    def add(self, noted: Tensor) -> None: ...


class RolloutRoutes(ReplayMode):
    """r3 and weights: the rollout's routes, in scoring and in the update."""

    in_scoring = True

    def __init__(self, config: FromRollout) -> None:
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
    """soft: the rollout's routes, but for experts that the trainer finds too unlikely. Counts those."""

    def __init__(self, config: SoftReplay) -> None:
        super().__init__(config)
        self.settings = {"soft": config.ratio}
        self._replaced: list[Tensor] = []  # [L] per forward

    def saw(self, tape: RouteRecorder | ReplayHandle | None) -> None:
        if isinstance(tape, ReplayHandle):
            self._replaced.append(tape.replaced_fraction())

    def metrics(self) -> dict[str, float]:
        replaced = self.take()
        return {"train/soft_replaced": float(torch.stack(replaced).mean())} if replaced else {}

    def take(self) -> list[Tensor]:
        taken, self._replaced = self._replaced, []
        return taken

    def add(self, noted: Tensor) -> None:
        self._replaced.append(noted)


class ScoringRoutes(ReplayMode):
    """r2: the update takes the experts that scoring chose (GSPO, arXiv:2507.18071)."""

    def routes(self, micro: TokenBatch) -> RoutingTrace | None:
        assert micro.routing_native is not None, "r2 replays the routes that score() recorded"
        return micro.routing_native


def replay_mode(config: ReplayConfig) -> ReplayMode:
    """config: the section `replay`."""
    if isinstance(config, SoftReplay):
        return SoftRoutes(config)
    if isinstance(config, FromRollout):
        return RolloutRoutes(config)
    return ScoringRoutes() if isinstance(config, R2) else ReplayMode()
