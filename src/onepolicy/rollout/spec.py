"""What an engine is built from. Every kind of engine has a factory `build(spec)` (build/engines.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onepolicy.config import EngineConfig, ModelConfig, QuantFormat
from onepolicy.config.numerics import Numerics
from onepolicy.replay.checks import RouteSpec


@dataclass(frozen=True, slots=True)
class EngineSpec:
    model: ModelConfig
    config: EngineConfig
    device: torch.device
    max_len: int  # prompt + completion tokens
    route_spec: RouteSpec | None = None  # record the experts of every token, of these layers
    combine_weights: bool = False  # and their combine weights
    numerics: Numerics = "fast"
    quant: QuantFormat | None = None  # of the engine's weights, now and after every sync
