"""What every engine behind HTTP goes through before a run samples from it: connected, given its weights, and asked
whether it returns the log-probabilities of the distribution that it samples from."""

from __future__ import annotations

import asyncio
import math
import statistics

from torch import Tensor

from onepolicy.config import ModelConfig, ServerEngineConfig, UsageError
from onepolicy.interfaces import PersistentEngine, RolloutEngine
from onepolicy.models.load import read_config
from onepolicy.rollout.servers.http import EngineClient
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.push import attach_engine
from onepolicy.types import Completion, Sampling


def refuse_nccl_without_cuda(spec: EngineSpec) -> None:
    config, device = spec.config, spec.device
    assert isinstance(config, ServerEngineConfig)
    if config.sync == "nccl" and device.type != "cuda":
        raise UsageError(
            f"rollout.engine.sync: nccl, but the trainer computes on the {device.type}; use gloo or disk"
        )


async def connect_engine(
    engine: PersistentEngine, client: EngineClient, model: ModelConfig
) -> None:
    """Connect, and give the server the weights of `model`, like an engine that loaded them itself."""
    with client.startup_errors():
        await engine.connect()
        await attach_engine(
            engine, model.path, vocab=read_config(model).get_text_config().vocab_size
        )
    engine.take_metrics()


LIKELIEST = 5
MEND = "start it so that they are processed, as vLLM with --logprobs-mode processed_logprobs"
CLEAR = 0.05
"""nats between two tokens, from which on rounding cannot be mistaken for a temperature."""


async def check_probabilities(engine: RolloutEngine, *, narrowed: bool = True) -> None:
    """UsageError if it returns raw log-probabilities, or logits.

    At temperature 1/2 two tokens lie twice as far apart as at 1 (a model that finds all tokens equally likely cannot
    tell, and has nothing to get wrong). narrowed: and top_k = 1 leaves one token, of log-probability 0.
    """
    name = type(engine).__name__
    count = min(LIKELIEST, engine.caps.top_logprobs)
    if count < 2:
        raise UsageError(
            f"rollout.engine: {name} returns {count} of the likeliest tokens, too few to tell which distribution its "
            "log-probabilities are of; start it with more (vLLM: --max-logprobs)"
        )
    where = f"rollout.engine: {name} does not return the log-probabilities it samples from"
    warm = await _first_tokens(engine, Sampling(1.0, 1, top_logprobs=count))
    cold = await _first_tokens(engine, Sampling(0.5, 1, top_logprobs=count))
    pairs = [(_spread(a), _spread(b)) for a, b in zip(warm, cold, strict=True)]
    uncertain = [
        pair for pair in pairs if not math.isfinite(sum(pair))
    ]  # the largest of NaN is any value
    at_one, at_half = uncertain[0] if uncertain else max(pairs)
    if not at_one <= CLEAR and not at_half >= 1.5 * at_one:  # also if a value is NaN
        raise UsageError(
            f"{where}: the {count} likeliest tokens lie {at_one:.3g} nats apart at temperature 1 and {at_half:.3g} at "
            f"0.5, where it must be twice as far; {MEND}"
        )
    if narrowed:
        only = await _first_tokens(engine, Sampling(1.0, 1, top_k=1))
        found = [float(done.logp) for done in only]
        broken = [logp for logp in found if not math.isfinite(logp)]  # so is their median
        typical = (
            broken[0] if broken else statistics.median(found)
        )  # where tokens tie, more than one is left
        if not typical >= -1e-4:
            raise UsageError(
                f"{where}: with top_k = 1 the only token has log-probability {typical:.3g}, not 0; {MEND}"
            )


async def _first_tokens(engine: RolloutEngine, sampling: Sampling) -> list[Completion]:
    return await asyncio.gather(*(engine.generate([i], sampling, seed=i) for i in range(8)))


def _spread(done: Completion) -> float:
    """Of the likeliest tokens; those of probability 0 (-inf), which a head rules out, are no distance away."""
    top = done.top_logp
    assert isinstance(top, Tensor)
    possible = top[0][top[0] != -math.inf]
    return float(possible.max() - possible.min()) if len(possible) else math.nan
