"""The arguments of an engine factory `build(spec)`, one per engine kind (build/engines.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onepolicy.config import EngineConfig, ModelConfig, QuantFormat, RoutingPressure
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import Numerics
from onepolicy.replay.checks import RouteSpec


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The model and settings from which an engine is built."""

    model: ModelConfig
    config: EngineConfig
    device: torch.device
    max_len: int  # prompt + completion tokens
    route_spec: RouteSpec | None = None  # layers whose experts are returned for every token
    combine_weights: bool = False  # return the combine weights of those experts too
    numerics: Numerics = "fast"
    quant: QuantFormat | None = None  # of the engine's weights, now and after every sync
    gpu_share: float = 1.0  # of a GPU's memory that is the engine's, for an engine that reserves it
    beside_learner: bool = False  # samples while the learner works (rollout.max_staleness)
    sleeps: bool = False  # frees that memory while the learner works
    lora: LoraConfig | None = None  # adapters that the engine is sent and computes with
    pressure: RoutingPressure | None = None  # noise on the embedded engine's routers, for studies
