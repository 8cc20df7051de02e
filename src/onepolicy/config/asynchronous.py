"""Training on tokens of older weights (rollout.max_staleness): what it brings along, and what it rules out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.objective import FromRollout

if TYPE_CHECKING:
    from onepolicy.config.run import RunConfig


def check_asynchronous(config: RunConfig) -> None:
    """ValueError for what needs the weights that sampled, which the trainer no longer has."""
    rollout = config.rollout
    if not rollout.overlaps:
        return
    mend = "set rollout.max_staleness to 0 or off"
    if rollout.engine.kind == "vllm":
        other = "hf" if config.cluster.kind == "ray" else "vllm-server"
        raise ValueError(
            "rollout.max_staleness: an engine of kind vllm takes weights only between requests, so that nothing could "
            f"be sampled over an update; use rollout.engine.kind = {other}"
        )
    if config.numerics == ON_POLICY:
        raise ValueError(
            f"rollout.max_staleness: {rollout.max_staleness} trains on tokens of older weights, which cannot have the "
            f"newest ones' log-probabilities to the bit, as numerics = on-policy asks; {mend}, or numerics to fast"
        )
    replay = config.replay
    if isinstance(replay, FromRollout) and replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill records routes when a step's samples are complete, with other weights than "
            f"sampled them where rollout.max_staleness = {rollout.max_staleness}; set it to engine, or {mend}"
        )
