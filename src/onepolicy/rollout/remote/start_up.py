"""The start-up of every engine behind HTTP.

Before a run samples from the engine, it checks that the returned log-probabilities are those of the
distribution sampled from.
"""

from __future__ import annotations

import asyncio
import math
import statistics

from torch import Tensor

from onepolicy.config import ServerEngineConfig, UsageError
from onepolicy.interfaces import RolloutEngine, engine_name
from onepolicy.notation import number
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Completion, Sampling

NUM_PROMPTS = 8
NUM_TOP_TOKENS = 5
HINT = "start it so that they are processed, as vLLM with --logprobs-mode processed_logprobs"
MIN_SPREAD = 0.05
"""Nats between two tokens. From here on rounding cannot be mistaken for a temperature."""


def refuse_nccl_without_cuda(spec: EngineSpec) -> None:
    config, device = spec.config, spec.device
    assert isinstance(config, ServerEngineConfig)
    if config.sync == "nccl" and device.type != "cuda":
        raise UsageError(
            f"rollout.engine.sync: nccl, but the trainer computes on the {device.type}; use gloo "
            "or disk"
        )


async def check_processed_logprobs(engine: RolloutEngine, *, narrowed: bool = True) -> None:
    """Raise UsageError if the engine returns raw log-probabilities, or logits.

    narrowed: check top_k too.
    """
    name = engine_name(engine)
    count = min(NUM_TOP_TOKENS, engine.caps.top_logprobs)
    if count < 2:
        raise UsageError(
            f"rollout.engine: {name} returns {count} of the most likely tokens, too few to check "
            "its log-probabilities; start it with more (vLLM: --max-logprobs)"
        )
    where = f"rollout.engine: {name} does not return the log-probabilities it samples from"
    await _check_tempered(engine, count, where)
    if narrowed:
        await _check_top_k(engine, where)


async def _check_tempered(engine: RolloutEngine, count: int, where: str) -> None:
    """Check that two tokens are twice as far apart at temperature 1/2 as at 1.

    Pass a model that finds all tokens equally likely: there temperatures make no difference.
    """
    at_one = await _first_tokens(engine, Sampling(1.0, 1, top_logprobs=count))
    at_half = await _first_tokens(engine, Sampling(0.5, 1, top_logprobs=count))
    pairs = [(_spread(a), _spread(b)) for a, b in zip(at_one, at_half, strict=True)]
    not_finite = [pair for pair in pairs if not math.isfinite(sum(pair))]
    spread, spread_at_half = max(pairs)
    if not_finite:  # then max may have missed them
        spread, spread_at_half = not_finite[0]
    if not spread <= MIN_SPREAD and not spread_at_half >= 1.5 * spread:  # also if a value is NaN
        raise UsageError(
            f"{where}: the {count} most likely tokens are {number(spread)} nats apart at "
            f"temperature 1 and {number(spread_at_half)} at 0.5, where they must be twice as far "
            f"apart; {HINT}"
        )


async def _check_top_k(engine: RolloutEngine, where: str) -> None:
    """Check that with top_k = 1 the only token has log-probability 0."""
    completions = await _first_tokens(engine, Sampling(1.0, 1, top_k=1))
    logp = [float(completion.logp) for completion in completions]
    typical = statistics.median_high(logp)  # where tokens tie, more than one is left
    not_finite = [value for value in logp if not math.isfinite(value)]
    if not_finite:
        typical = not_finite[0]
    if not typical >= -1e-4:
        raise UsageError(
            f"{where}: with top_k = 1 the only token has log-probability {number(typical)}, not 0; "
            f"{HINT}"
        )


async def _first_tokens(engine: RolloutEngine, sampling: Sampling) -> list[Completion]:
    calls = (engine.generate([i], sampling, seed=i) for i in range(NUM_PROMPTS))
    return await asyncio.gather(*calls)


def _spread(completion: Completion) -> float:
    """Return the distance of the most and the least likely of the returned tokens.

    Leave out tokens of probability 0 (-inf), which a head rules out.
    """
    top = completion.top_logp
    assert isinstance(top, Tensor)
    possible = top[0][top[0] != -math.inf]
    if not len(possible):
        return math.nan
    return float(possible.max() - possible.min())
