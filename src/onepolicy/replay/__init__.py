"""Rollout routing replay: the trainer uses the rollout's experts (R3, arXiv:2510.11370)."""

from onepolicy.replay.checks import RoutingError
from onepolicy.replay.layers import is_moe, require_moe
from onepolicy.replay.routers import Routers, bind_routers

__all__ = [
    "Routers",
    "RoutingError",
    "bind_routers",
    "is_moe",
    "require_moe",
]
