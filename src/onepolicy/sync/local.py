"""Weights within one process: the engine copies the learner's tensors."""

from __future__ import annotations

from onepolicy.interfaces import Learner, RolloutEngine


async def push_weights(learner: Learner, engine: RolloutEngine) -> None:
    """Afterwards the engine samples from the learner's version, with nothing cached from an older one."""
    await engine.load_weights(learner.named_weights(), learner.version)
    if engine.version != learner.version:
        raise RuntimeError(f"engine holds version {engine.version} after loading version {learner.version}")
