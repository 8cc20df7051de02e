"""The recorder of routes for an engine that returns none (replay.source = reprefill)."""

from __future__ import annotations

import torch

from onepolicy.config import ModelConfig, RunConfig, WeightsReplay
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.train.reprefill import Reprefill
from onepolicy.train.scorer import PolicyScorer


def build_reprefill(config: RunConfig, model: ModelConfig, device: torch.device) -> Reprefill:
    """Build a second copy of the model, in the engine's dtype, that records routes."""
    recording_model = load_engine_copy(model, config.rollout, device)
    routers = bind_routers(recording_model)
    scorer = PolicyScorer(recording_model.eval(), config, routers=routers)
    combine = isinstance(config.replay, WeightsReplay)
    return Reprefill(scorer, tokens=config.train.tokens_per_micro_batch, weights=combine)
