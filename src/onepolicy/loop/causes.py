"""The scorings behind `onepolicy measure`: the same tokens again, with one thing changed at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from onepolicy.config import FromRollout, ModelConfig
from onepolicy.loop.setup import load_copy
from onepolicy.measure.attribution import Estimate, Scoring, Waterfall, distance, excess, waterfall
from onepolicy.replay.routers import bind_routers
from onepolicy.train.learner import LocalLearner
from onepolicy.types import TokenBatch

STEP = 0.02  # of the temperature, for its derivative
SAME = 0.01  # a fitted factor closer to 1 than this is 1
ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Alone:
    """One change measured by itself, not a step of the waterfall."""

    name: str
    how: str
    nats: Estimate


def variant(learner: LocalLearner, *, model: Any = None, **train: Any) -> LocalLearner:
    """A learner that only scores: with other train settings, or of another model. It never refuses routes."""
    config = learner.config
    settings = config.train.model_copy(update={"activation_checkpointing": False, **train})
    replay = config.replay
    if isinstance(replay, FromRollout):
        replay = replay.model_copy(update={"min_agreement": 0.0})
    routers = learner.routers if model is None or learner.routers is None else bind_routers(model)
    other = config.model_copy(update={"train": settings, "replay": replay})
    return LocalLearner(learner.model if model is None else model, other, routers=routers)


def fit_temperature(learner: LocalLearner, native: TokenBatch) -> tuple[float, TokenBatch]:
    """(factor, batch scored without replay at that factor): by what to multiply the trainer's temperature to come
    closest to the rollout, in squares of log rho (Gauss-Newton); exactly 1 and `native` itself if that is within SAME.
    """
    factor, scored = 1.0, native
    for _ in range(ROUNDS):
        nearby = learner.score_without_replay(at_temperature(native, factor * (1 + STEP)))
        slope = (_logp(nearby) - _logp(scored))[native.trainable].double() / STEP
        gap = (native.logp_rollout - _logp(scored))[native.trainable].double()
        change = float(gap @ slope / (slope @ slope).clamp(min=1e-12))
        factor *= 1 + max(-0.5, min(1.0, change))
        scored = learner.score_without_replay(at_temperature(native, factor))
        if abs(change) < SAME / 2:
            break
    return (1.0, native) if abs(factor - 1) < SAME else (factor, scored)


def at_temperature(batch: TokenBatch, factor: float) -> TokenBatch:
    return batch.replace(temperature=batch.temperature * factor)


def attribute(
    learner: LocalLearner, native: TokenBatch, fitted: TokenBatch, factor: float, model: ModelConfig, *, replay: bool
) -> tuple[Waterfall, list[Alone]]:
    """`native`: scored without replay; `fitted`: the same at `factor` times the temperature; replay: with routes."""
    config, rollout, mask, segment = learner.config, native.logp_rollout, native.trainable, native.segment
    batch = at_temperature(native, factor)

    def score(scorer: LocalLearner) -> Tensor:
        return _logp(scorer.score_again(batch) if replay else scorer.score_without_replay(batch))

    at = f"trainer at {factor:.3f} times its temperature" if factor != 1 else "the best factor is 1: nothing changed"
    steps = [Scoring("temperature", at, _logp(fitted))]
    trainer = score(variant(learner))
    if replay:
        steps.append(Scoring("routing", "trainer with the rollout's routes replayed", trainer))
    engine = config.rollout.engine
    dtype, copy = engine.dtype, load_copy(model, engine, learner.device)
    packed = score(variant(learner, model=copy, autocast="off"))
    if dtype != config.model.dtype:
        steps.append(
            Scoring("engine precision", f"the trainer's forward on weights and activations in {dtype}", packed)
        )
    single = variant(learner, tokens_per_micro_batch=1)
    single_copy = variant(learner, model=copy, autocast="off", tokens_per_micro_batch=1)
    alone = [
        Alone(
            "batch shape, trainer",
            "between each sequence scored by itself and packed with others",
            distance(score(single), trainer, mask, segment),
        ),
        Alone(
            f"batch shape, {dtype}",
            "the same on a copy of the model in the engine's dtype",
            distance(score(single_copy), packed, mask, segment),
        ),
    ]
    if dtype != "float32" and engine.lm_head == "same" and type(copy.get_output_embeddings()) is nn.Linear:
        headed = load_copy(model, engine.model_copy(update={"lm_head": "float32"}), learner.device)
        head = score(variant(learner, model=headed, autocast="off"))
        how = f"how much nearer a {dtype} copy comes to the trainer with rollout.engine.lm_head=float32"
        alone.append(Alone("lm_head in fp32", how, excess(packed, head, trainer, mask, segment)))
    if config.model.dtype == "float32":
        cast = score(variant(learner, autocast="off" if config.train.autocast == "bfloat16" else "bfloat16"))
        with_cast, without = (trainer, cast) if config.train.autocast == "bfloat16" else (cast, trainer)
        how = "what bf16 autocast in the trainer adds to the gap, against fp32"
        alone.append(Alone("trainer precision", how, excess(with_cast, without, rollout, mask, segment)))
    start = _logp(native)
    return waterfall(rollout, start, steps, mask, segment), alone


def _logp(batch: TokenBatch) -> Tensor:
    assert batch.logp_old is not None
    return batch.logp_old
