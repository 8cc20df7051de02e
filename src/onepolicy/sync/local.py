"""Weights within one process: the engine copies the learner's tensors."""

from __future__ import annotations

from onepolicy.interfaces import HoldsWeights, Learner


async def push_weights(learner: Learner, *engines: HoldsWeights) -> None:
    """Afterwards every engine samples from the learner's version, with nothing cached from an older one."""
    for engine in engines:
        await engine.load_weights(learner.named_weights(), learner.version)
        if engine.version != learner.version:
            raise RuntimeError(f"engine holds version {engine.version} after loading version {learner.version}")
