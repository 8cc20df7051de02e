"""The engine of a run: which factory builds each kind, and what the engine must be able to do."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from onepolicy.config import FromRollout, RunConfig, UsageError, WeightsReplay
from onepolicy.interfaces import EngineCaps, RolloutEngine
from onepolicy.rollout.spec import EngineSpec

ENGINES = {
    "hf": "onepolicy.rollout.hf.engine:build",
    "vllm": "onepolicy.rollout.vllm.engine:build",
    "vllm-server": "onepolicy.rollout.vllm.server:build",
    "sglang": "onepolicy.rollout.sglang.engine:build",
}
"""rollout.engine.kind -> its factory, imported when a run uses it."""

BuildEngine = Callable[[EngineSpec], RolloutEngine]


def build_engine(spec: EngineSpec) -> RolloutEngine:
    """The engine with a copy of its own of the model's weights, in its own dtype and format."""
    build: BuildEngine = pkgutil.resolve_name(ENGINES[spec.config.kind])
    return build(spec)


def check_engine_capabilities(config: RunConfig, caps: EngineCaps, top_logprobs: int) -> None:
    """Does the engine return what replay.mode replays and the correction needs?"""
    if top_logprobs > caps.top_logprobs:
        correction = config.correction
        most = f"but this engine returns those of at most {caps.top_logprobs}"
        if correction.centering == "support" and caps.top_logprobs:
            raise UsageError(
                f"correction.centering: support needs the log-probabilities of all {top_logprobs} tokens, {most}; use "
                "head"
            )
        mend = (
            f"set it to at most {caps.top_logprobs}"
            if caps.top_logprobs
            else "choose one without centering"
        )
        raise UsageError(
            f"correction.head_size: {correction.name} needs the log-probabilities of the {top_logprobs} likeliest "
            f"tokens, {most}; {mend}"
        )
    mode = config.replay.mode
    if not isinstance(config.replay, FromRollout) or config.replay.source == "reprefill":
        return
    if not caps.returns_routes:
        raise UsageError(
            f"replay.mode: {mode} needs the rollout's routes, which this engine does not return; set it to off or "
            "record them by a second forward (replay.source=reprefill)"
        )
    if isinstance(config.replay, WeightsReplay) and not caps.returns_combine_weights:
        raise UsageError(
            "replay.mode: weights needs the combine weights, which this engine does not return; use r3"
        )
