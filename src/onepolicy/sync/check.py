"""Does a weight sync leave the engine with the weights it was given? Asked of every engine, once, at a run's start.

An engine that has just loaded the learner's checkpoint holds the learner's weights already, so the first sync must not
move a single log-probability. vLLM 0.30.0 on the CPU fails this without our mend (rollout/vllm/weights.py): its experts
are silently wrong after any reload.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.interfaces import PersistentEngine, RolloutEngine, WeightSource, WeightTarget
from onepolicy.types import Sampling


async def push_weights(learner: WeightSource, *engines: WeightTarget) -> None:
    """Afterwards every engine samples from the learner's version, with nothing cached from an older one."""
    for engine in engines:
        await engine.load_weights(learner.named_weights(), learner.version)
        if engine.version != learner.version:
            raise RuntimeError(
                f"engine holds version {engine.version} after loading version {learner.version}"
            )


PROMPTS, LENGTH = 16, 24
MARGIN = 4
"""Times the largest difference of two probes without a sync, which is 0 where kernels are deterministic (the CPU)."""


async def adopt(engine: PersistentEngine, path: str, *, vocab: int) -> None:
    """Give an engine that serves one run after another the weights of `path` (folder or hub id).

    Its reload is checked on the weights it was started with, by a probe made when it still held them: a run that finds
    other weights could not tell a reload that is wrong every time from one that is right. UsageError if it is wrong.
    """
    first = await _first_probe(engine, vocab)
    if not engine.has_initial_checkpoint(path):
        await _check_reload(engine, first, vocab)
        await engine.load_checkpoint(str(Path(path).resolve()) if Path(path).exists() else path, 0)


async def readopt(engine: PersistentEngine, *, vocab: int) -> None:
    """The same for one that was restarted while a run goes on, which then gives it the learner's weights."""
    await _check_reload(engine, await _first_probe(engine, vocab), vocab)


async def _first_probe(engine: PersistentEngine, vocab: int) -> list[float]:
    first = engine.initial_canary()
    if first is None:
        first = (await probe(engine, vocab)).tolist()
        await engine.store_initial_canary(first)
    return first


async def _check_reload(engine: PersistentEngine, first: list[float], vocab: int) -> None:
    await engine.load_checkpoint(None, 0)
    after, again = await probe(engine, vocab), await probe(engine, vocab)
    noise, moved = (
        float((again - after).abs().max()),
        float((after - torch.tensor(first)).abs().max()),
    )
    if not moved <= MARGIN * noise < math.inf:  # also if either is NaN
        raise UsageError(
            f"rollout.engine: {type(engine).__name__} was given the weights it was started with, and its "
            f"log-probabilities of a fixed batch are up to {moved:.2g} from those at its start (without a reload: "
            f"{noise:.2g}); its weights are wrong after a reload"
        )


async def checked_push(learner: WeightSource, engine: RolloutEngine, *, vocab: int) -> None:
    """The first sync: engine still holds the weights that learner started from. TrainingError if it moves anything."""
    before, again = await probe(engine, vocab), await probe(engine, vocab)
    await push_weights(learner, engine)
    after = await probe(engine, vocab)
    noise, moved = float((again - before).abs().max()), float((after - before).abs().max())
    if not moved <= MARGIN * noise < math.inf:  # also if either is NaN
        raise TrainingError(
            f"weight sync: giving {type(engine).__name__} the weights it already holds moved the log-probabilities of "
            f"a fixed batch by up to {moved:.2g} (without a sync: {noise:.2g}); its weights are wrong after a sync "
            "and every rollout would be another policy's"
        )
    await engine.reset_cache()


async def probe(engine: RolloutEngine, vocab: int) -> Tensor:
    """Log-probabilities of the most likely next token of random prompts, nothing cached: [PROMPTS] float32."""
    length = min(LENGTH, engine.caps.max_len - 1)
    prompts = torch.randint(
        vocab, (PROMPTS, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    await engine.reset_cache()
    greedy = Sampling(temperature=0.0, max_tokens=1)
    # one at a time: which requests of a server meet in a batch is chance, and decides the last bits
    completions = [await engine.generate(p, greedy, seed=i) for i, p in enumerate(prompts)]
    return torch.cat([completion.logp for completion in completions])
