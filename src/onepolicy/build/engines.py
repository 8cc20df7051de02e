"""The engine of a run: the factory of each kind, and the check of its capabilities."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path

import torch

from onepolicy.config import (
    HFEngineConfig,
    ModelConfig,
    RolloutReplay,
    RunConfig,
    UsageError,
    WeightsReplay,
)
from onepolicy.interfaces import EngineCaps, RolloutEngine
from onepolicy.rollout.spec import EngineSpec

ENGINES = {
    "hf": "onepolicy.rollout.hf.engine:build",
    "vllm": "onepolicy.rollout.vllm.engine:build",
    "vllm-server": "onepolicy.rollout.remote.servers:build",
    "sglang": "onepolicy.rollout.remote.servers:build",
}
"""The factory of each rollout.engine.kind, imported when a run uses it."""

BuildEngine = Callable[[EngineSpec], RolloutEngine]


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """Build the engine with a separate copy of the model's weights, in its dtype and format."""
    if spec.config.kind != "hf" and (Path(spec.model.path) / "adapter_config.json").is_file():
        raise UsageError(
            f"model.path: {spec.model.path} holds an adapter, but {spec.config.kind} loads whole "
            "models; use rollout.engine.kind = hf, which merges it"
        )
    build: BuildEngine = pkgutil.resolve_name(ENGINES[spec.config.kind])
    return build(spec)


def build_evaluator(
    config: RunConfig, model: ModelConfig, device: torch.device, max_len: int
) -> RolloutEngine | None:
    """Build an embedded engine without quantisation and pressure, if evaluations need one."""
    if not config.has_evaluator:
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


def check_engine_capabilities(config: RunConfig, caps: EngineCaps, top_logprobs: int) -> None:
    """Raise UsageError unless the engine returns everything that replay and correction need."""
    if top_logprobs > caps.top_logprobs:
        raise UsageError(_describe_too_few(config, caps.top_logprobs, top_logprobs))
    mode = config.replay.mode
    if not isinstance(config.replay, RolloutReplay) or config.replay.source == "reprefill":
        return
    if not caps.returns_routes:
        raise UsageError(
            f"replay.mode: {mode} needs the rollout's routes, which this engine does not return; "
            "set it to off or record them by a second forward (replay.source=reprefill)"
        )
    if isinstance(config.replay, WeightsReplay) and not caps.returns_combine_weights:
        raise UsageError(
            "replay.mode: weights needs the combine weights, which this engine does not return; "
            "use r3"
        )


def _describe_too_few(config: RunConfig, returned: int, needed: int) -> str:
    """Return the setting, why it cannot be, and a fix."""
    correction = config.correction
    most = f"but this engine returns those of at most {returned}"
    if correction.centering == "support" and returned:
        return (
            f"correction.centering: support needs the log-probabilities of all {needed} tokens, "
            f"{most}; use head"
        )
    fix = "choose one without centering"
    if returned:
        fix = f"set it to at most {returned}"
    return (
        f"correction.head_size: {correction.name} needs the log-probabilities of the {needed} "
        f"likeliest tokens, {most}; {fix}"
    )
