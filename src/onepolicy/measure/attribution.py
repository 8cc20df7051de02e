"""Why the gap is there: one thing changed at a time, the same tokens scored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import ModelConfig
from onepolicy.divergence.attribution import Estimate, Level, Waterfall, distance, excess, waterfall
from onepolicy.measure.engine_noise import Again
from onepolicy.models.linear import is_plain_linear
from onepolicy.models.load import load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.train.rescore import Rescorer, fit_support, fit_temperature, k3_of, logp_of, variant
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch
from onepolicy.verdict.rules import HARMLESS_KL
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST


@dataclass(frozen=True, slots=True)
class Alone:
    """One change measured by itself, not a step of the waterfall."""

    name: str
    how: str
    nats: Estimate


@dataclass(frozen=True, slots=True)
class Explained:
    """A batch scored without replay, and what of its gap goes away when the settings of both sides are made equal."""

    native: TokenBatch
    shift: int  # slots by which the engine's log-probabilities are moved to meet the trainer's; 0: they are aligned
    aligned: TokenBatch  # after that, over the tokens that still have one
    narrowed: TokenBatch  # scored over the engine's support as well
    fitted: TokenBatch  # and at its temperature
    rescorer: Rescorer  # at that temperature and support

    @property
    def k3(self) -> float:
        return k3_of(self.fitted)


def explain(scorer: PolicyScorer, native: TokenBatch) -> Explained:
    """`native` is scored without replay. A support is only taken on if that leaves less than EXPLAINED of the gap."""
    shift, aligned = realigned(native)
    plain = Rescorer(scorer)
    rescorer, fitted = fit_temperature(plain, aligned)
    if scorer.config.rollout.quant is not None and k3_of(fitted) >= EXPLAINED * k3_of(aligned):
        rescorer, fitted = (
            plain,
            aligned,
        )  # rounded weights flatten a distribution a little, as a temperature would
    narrowed = aligned
    if (left := k3_of(fitted)) >= HARMLESS_KL:
        starts = (
            [(plain, aligned)] if rescorer.factor == 1 else [(plain, aligned), (rescorer, fitted)]
        )
        for start in starts:
            if (found := fit_support(*start)) is None:
                continue
            both, at_both = fit_temperature(*found)
            if k3_of(at_both) < EXPLAINED * left:
                left, rescorer, fitted = k3_of(at_both), both, at_both
                narrowed = dataclasses.replace(both, factor=1.0)(aligned)
    return Explained(native, shift, aligned, narrowed, fitted, rescorer)


def realigned(batch: TokenBatch) -> tuple[int, TokenBatch]:
    """(by, batch): its log-probabilities of the rollout moved by as many slots as make them meet the trainer's, if that
    leaves less than EXPLAINED of mean |log rho|; else 0 and `batch` itself."""
    slots = batch.trainable.nonzero()[:, 0]
    for by in (1, -1, 2, -2):
        there = (slots + by).clamp(0, batch.num_slots - 1)
        inside = (
            (there == slots + by)
            & batch.trainable[there]
            & (batch.segment[there] == batch.segment[slots])
        )
        here, there = slots[inside], there[inside]
        if len(here) < FEWEST:
            continue
        trainer = logp_of(batch)[here]
        before = float((trainer - batch.logp_rollout[here]).abs().mean())
        if (
            before > 0.05
            and float((trainer - batch.logp_rollout[there]).abs().mean()) < EXPLAINED * before
        ):
            moved = batch.logp_rollout.index_copy(0, here, batch.logp_rollout[there])
            kept = torch.zeros_like(batch.trainable).index_fill(0, here, True)
            return by, batch.replace(logp_rollout=moved, trainable=kept)
    return 0, batch


@dataclass(frozen=True, slots=True)
class Weights:
    """The engine's side of the question whether it holds the trainer's weights."""

    explained: (
        Explained  # with the weights made equal, or of the first look if they were not touched
    )
    how: str
    scorer: PolicyScorer  # that holds the engine's weights
    model: ModelConfig  # where they come from


def attribute(
    first: Explained, weights: Weights, alone: Again, *, replay: bool
) -> tuple[Waterfall, list[Alone]]:
    """first: as it is; alone: the same requests one at a time, of the batch in `weights`; replay: there are routes."""
    seen, scorer = weights.explained, weights.scorer
    rescorer, batch, config = seen.rescorer, seen.aligned, scorer.config

    def score(other: PolicyScorer) -> Tensor:
        return logp_of(rescorer.of(other)(batch, replay=replay))

    trainer = score(variant(scorer))
    rollout, quant = config.rollout, config.rollout.quant
    dtype, copy = (
        rollout.engine.dtype,
        load_engine_copy(weights.model, rollout, scorer.device, quantised=False),
    )
    same = variant(scorer, model=copy, autocast="off")
    packed = score(same)
    steps = [
        _level("misaligned tokens", _shift_words(first.shift), first.aligned),
        _level("stale weights", weights.how, seen.aligned),
        _level("sampling support", _support_words(seen.rescorer), seen.narrowed),
        _level("temperature", _temperature_words(seen.rescorer.factor), seen.fitted),
    ]
    last = logp_of(seen.fitted)
    if replay:
        steps.append(_level("routing", "the trainer replays the rollout's routes", batch, trainer))
        last = trainer
    if dtype != config.model.dtype or config.train.autocast != "off":
        how = f"the trainer's forward on weights and activations in {dtype}, without autocast"
        steps.append(_level("precision", how, batch, packed))
        last = packed
    if quant is not None:
        rounded = variant(
            scorer, model=load_engine_copy(weights.model, rollout, scorer.device), autocast="off"
        )
        how = f"the trainer's forward on weights in {quant.format}, quantised as the engine's are"
        last = score(rounded)
        steps.append(_level("quantisation", how, batch, last))
    if alone.same.any() and seen.shift == 0:
        how = f"the engine samples one sequence at a time; {alone.share:.0%} of the tokens come out the same"
        steps.append(_level("batch shape", how, batch.replace(logp_rollout=alone.logp), last))
    each_alone = _alone(score, trainer, packed, same, weights.model, batch)
    if alone.same.any():
        how = "k3 between the engine sampling one sequence at a time and all together, same tokens"
        noise = distance(alone.logp, alone.before, alone.same, seen.native.segment)
        each_alone.insert(0, Alone("engine, one at a time", how, noise))
    return waterfall(_level("", "", first.native), steps), each_alone


def _alone(
    score: Callable[[PolicyScorer], Tensor],
    trainer: Tensor,
    packed: Tensor,
    same: PolicyScorer,
    model: ModelConfig,
    batch: TokenBatch,
) -> list[Alone]:
    """same: a scorer of the copy in the engine's dtype, which scored `packed`; `trainer` is the trainer's score."""
    engine, mask, segment = same.config.rollout.engine, batch.trainable, batch.segment
    single = variant(same, model=same.model, tokens_per_micro_batch=1)
    how = (
        "k3 between each sequence scored by itself and packed with others, on the trainer's kernels"
    )
    noise = distance(score(single), packed, mask, segment)
    out = [Alone(f"{engine.dtype}, other packing", how, noise)]
    if (
        engine.dtype != "float32"
        and engine.lm_head == "same"
        and is_plain_linear(same.model.get_output_embeddings())
    ):
        rollout = same.config.rollout
        headed = load_engine_copy(model, rollout, same.device, lm_head="float32", quantised=False)
        head = score(variant(same, model=headed))
        how = f"how much nearer a {engine.dtype} forward comes to the trainer with rollout.engine.lm_head=float32"
        out.append(Alone("lm_head in float32", how, excess(packed, head, trainer, mask, segment)))
    return out


def trainer_precision(
    rescorer: Rescorer, model: ModelConfig, batch: TokenBatch, *, replay: bool
) -> Alone:
    """What bf16 in the trainer adds to the gap: its weights in float32 against themselves or under autocast."""
    scorer, config = rescorer.scorer, rescorer.scorer.config

    def score(other: PolicyScorer) -> Tensor:
        return logp_of(rescorer.of(other)(batch, replay=replay))

    if config.model.dtype == "float32":
        low, high = (variant(scorer, autocast=name) for name in ("bfloat16", "off"))
        how = "what bf16 autocast in the trainer adds to the gap, against float32"
    else:
        low = variant(scorer)
        exact = load_model(model, torch.float32, scorer.device)
        prepare_for_training(exact, scorer.device)
        high = variant(scorer, model=exact, autocast="off")
        how = "what the trainer's bfloat16 weights and activations add to the gap, against a float32 forward of them"
    nats = excess(score(low), score(high), batch.logp_rollout, batch.trainable, batch.segment)
    return Alone("trainer in bfloat16", how, nats)


def _level(name: str, how: str, batch: TokenBatch, logp: Tensor | None = None) -> Level:
    scored = logp_of(batch) if logp is None else logp
    return Level.of(name, how, scored, batch.logp_rollout, batch.trainable, batch.segment)


def _shift_words(shift: int) -> str:
    if shift == 0:
        return "no shift by a slot or two comes nearer: nothing changed"
    return f"the engine's log-probabilities moved by {-shift:+d} slot, over the tokens that then have one"


def _support_words(rescorer: Rescorer) -> str:
    if not rescorer.support:
        return "no top-k or top-p explains the gap: nothing changed"
    return f"the trainer's distribution cut to {rescorer.support} and normalised again"


def _temperature_words(factor: float) -> str:
    if factor == 1:
        return "the best factor is 1: nothing changed"
    return f"the trainer at {factor:.3f} times its temperature"
