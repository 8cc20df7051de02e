"""Pushing the learner's weights to engines, and a check that a push leaves an engine with them.

The check runs on every engine, once, at the start of a run. An engine that has just loaded the
learner's checkpoint already holds the learner's weights, so the first push must not change a single
log-probability of a fixed batch of random prompts, the canary. vLLM 0.30.0 on the CPU fails this
check without the fix in rollout/vllm/weights.py: after any reload its experts are silently wrong.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.interfaces import (
    EngineCaps,
    PersistentEngine,
    RolloutEngine,
    WeightSource,
    WeightTarget,
)
from onepolicy.types import Sampling


async def push_weights(learner: WeightSource, *engines: WeightTarget) -> None:
    """Load the learner's version into every engine, which then drops its caches."""
    for engine in engines:
        caps: EngineCaps | None = getattr(engine, "caps", None)
        dtype: str | None = None
        if caps is not None:
            dtype = caps.weights_dtype
        await engine.load_weights(learner.named_weights(dtype), learner.version)
        if engine.version != learner.version:
            raise RuntimeError(
                f"engine holds version {engine.version} after loading version {learner.version}"
            )


CANARY_PROMPTS, CANARY_TOKENS = 16, 24
NOISE_MARGIN = 4
"""Allowed change of the canary, as a multiple of its largest change without a push.

That change is 0 where kernels are deterministic, as on the CPU. On a GPU it is 0 by chance too, so
`canary_floor` is allowed beside it.
"""


async def attach_engine(engine: PersistentEngine, path: str, *, vocab: int) -> None:
    """Load the checkpoint at `path` (folder or hub id) into an engine that outlasts a run.

    First the engine reloads the weights it was started with. Its log-probabilities are compared
    with a canary from before any reload. The comparison needs that canary: a run that finds other
    weights in the engine cannot tell a reload that is always wrong from a correct one.
    Raises UsageError if the reload is wrong.
    """
    initial = await _initial_canary(engine, vocab)
    if engine.has_initial_checkpoint(path):
        return
    await _check_reload(engine, initial, vocab)
    if Path(path).exists():
        path = str(Path(path).resolve())
    await engine.load_checkpoint(path, 0)


async def reattach_engine(engine: PersistentEngine, *, vocab: int) -> None:
    """Check the reload of an engine that was restarted during a run. Raises UsageError.

    The caller pushes the learner's weights to it afterwards.
    """
    await _check_reload(engine, await _initial_canary(engine, vocab), vocab)


async def _initial_canary(engine: PersistentEngine, vocab: int) -> list[float]:
    initial = engine.initial_canary()
    if initial is None:
        initial = (await canary_logp(engine, vocab)).tolist()
        await engine.store_initial_canary(initial)
    return initial


async def _check_reload(engine: PersistentEngine, initial: list[float], vocab: int) -> None:
    await engine.load_checkpoint(None, 0)
    after, repeated = await canary_logp(engine, vocab), await canary_logp(engine, vocab)
    noise = float((repeated - after).abs().max())
    moved = float((after - torch.tensor(initial)).abs().max())
    if not moved <= allowed_change(engine, noise) < math.inf:  # also if either is NaN
        raise UsageError(
            f"rollout.engine: {type(engine).__name__} reloaded the weights it was started with, "
            f"and its log-probabilities of a fixed batch are up to {moved:.2g} from those at its "
            f"start (without a reload: {noise:.2g}); its weights are wrong after a reload"
        )


async def checked_push(learner: WeightSource, engine: RolloutEngine, *, vocab: int) -> None:
    """Push the learner's weights to an engine that already holds them, and check its canary.

    Raises TrainingError if a log-probability changes.
    """
    before, repeated = await canary_logp(engine, vocab), await canary_logp(engine, vocab)
    await push_weights(learner, engine)
    after = await canary_logp(engine, vocab)
    noise, moved = float((repeated - before).abs().max()), float((after - before).abs().max())
    if not moved <= allowed_change(engine, noise) < math.inf:  # also if either is NaN
        raise TrainingError(
            f"weight sync: giving {type(engine).__name__} the weights it already holds moved the "
            f"log-probabilities of a fixed batch by up to {moved:.2g} (without a sync: "
            f"{noise:.2g}); its weights are wrong after a sync and every rollout would be another "
            "policy's"
        )
    await engine.reset_cache()


def allowed_change(engine: RolloutEngine, noise: float) -> float:
    """Return the largest change of the canary [nats] that is no sign of other weights.

    noise: its change without a push. NaN stays NaN.
    """
    return NOISE_MARGIN * noise + engine.caps.canary_floor


async def canary_logp(engine: RolloutEngine, vocab: int) -> Tensor:
    """Return log-probabilities of the most likely next token of random prompts.

    Nothing is cached: the cache is reset first. Returns [CANARY_PROMPTS] float32.
    """
    length = min(CANARY_TOKENS, engine.caps.max_len - 1)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab, (CANARY_PROMPTS, length), generator=generator).tolist()
    await engine.reset_cache()
    greedy = Sampling(temperature=0.0, max_tokens=1)
    # One at a time. A server batches concurrent requests by chance, which changes the last bits.
    completions = [await engine.generate(p, greedy, seed=i) for i, p in enumerate(prompts)]
    return torch.cat([completion.logp for completion in completions])
