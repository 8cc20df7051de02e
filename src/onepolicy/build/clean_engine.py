"""The engine that evaluates without rollout.quant and rollout.pressure."""

from __future__ import annotations

import torch

from onepolicy.build.engines import build_engine
from onepolicy.config import HFEngineConfig, ModelConfig, RunConfig
from onepolicy.interfaces import RolloutEngine
from onepolicy.rollout.spec import EngineSpec


def build_evaluator(
    config: RunConfig, model: ModelConfig, device: torch.device, max_len: int
) -> RolloutEngine | None:
    """Build an embedded engine without quantisation and pressure, if evaluations need one."""
    rollout = config.rollout
    quantised = rollout.quant is not None and not config.eval.quantised
    if not config.eval.every or not (quantised or rollout.pressure is not None):
        return None
    return build_clean_engine(config, model, device, max_len)


def build_clean_engine(
    config: RunConfig, model: ModelConfig, device: torch.device, max_len: int
) -> RolloutEngine:
    """Build an embedded engine with the settings of the run's engine.

    Except rollout.quant and rollout.pressure.
    """
    engine = config.rollout.engine
    clean = HFEngineConfig(
        dtype=engine.dtype,
        lm_head=engine.lm_head,
        max_num_seqs=engine.max_num_seqs,
        max_len=engine.max_len,
    )
    return build_engine(EngineSpec(model, clean, device, max_len))
