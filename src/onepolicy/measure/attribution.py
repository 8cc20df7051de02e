"""Causes of the gap: one thing is changed at a time and the same tokens are scored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import ModelConfig
from onepolicy.divergence.attribution import Level, Waterfall, distance, excess, waterfall
from onepolicy.measure.engine_noise import Resampled
from onepolicy.models.linear import is_plain_linear
from onepolicy.models.load import cast_model, load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.models.quant.quantise import use_scales
from onepolicy.notation import number
from onepolicy.record.intervals import Interval
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.train.rescore import (
    Rescorer,
    fit_support,
    fit_temperature,
    k3_of,
    logp_of,
    variant_scorer,
)
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST

SUPPORT = "support"
OVER_SUPPORT = "the trainer scores over the tokens that each token was drawn from"


@dataclass(frozen=True, slots=True)
class Ablation:
    """One change measured by itself, not as a step of the waterfall."""

    name: str
    how: str
    nats: Interval


@dataclass(frozen=True, slots=True)
class Explained:
    """A batch scored without replay, and again with the settings of both sides made equal."""

    native: TokenBatch
    shift: int  # slots by which the engine's log-probabilities are moved; 0: they are aligned
    aligned: TokenBatch  # with the shift undone, over the tokens that then have a value
    narrowed: TokenBatch  # also scored over the engine's support
    fitted: TokenBatch  # also at the engine's temperature
    rescorer: Rescorer  # at that temperature and support

    @property
    def k3(self) -> float:
        """k3 with shift, support and temperature undone."""
        return k3_of(self.fitted)


def explain(scorer: PolicyScorer, native: TokenBatch) -> Explained:
    """Fit shift, temperature and support of the engine to `native`, which is scored without replay.

    A support is accepted only if it leaves less than EXPLAINED of the gap. None is looked for where
    the engine returned the supports.
    """
    shift, aligned = realigned(native)
    plain = Rescorer(scorer)
    rescorer, fitted = fit_temperature(plain, aligned)
    rollout = scorer.config.rollout
    flattens = rollout.quant is not None or rollout.pressure is not None
    if flattens and k3_of(fitted) >= EXPLAINED * k3_of(aligned):
        # Rounded weights and other experts flatten a distribution a little, as a temperature would.
        rescorer, fitted = plain, aligned
    narrowed, remaining = aligned, k3_of(fitted)
    if not remaining >= HARMLESS_KL or native.support is not None:  # also if it is NaN
        return Explained(native, shift, aligned, narrowed, fitted, rescorer)
    starts = [(plain, aligned)]
    if rescorer.factor != 1:
        starts.append((rescorer, fitted))
    for start in starts:
        found = fit_support(*start)
        if found is None:
            continue
        both, at_both = fit_temperature(*found)
        if k3_of(at_both) < EXPLAINED * remaining:
            remaining, rescorer, fitted = k3_of(at_both), both, at_both
            narrowed = dataclasses.replace(both, factor=1.0)(aligned)
    return Explained(native, shift, aligned, narrowed, fitted, rescorer)


def realigned(batch: TokenBatch) -> tuple[int, TokenBatch]:
    """Return a shift and the batch with the rollout's log-probabilities moved by it.

    The shift must leave less than EXPLAINED of mean |log rho|; else returns 0 and `batch` itself.
    """
    slots = batch.trainable.nonzero()[:, 0]
    for by in (1, -1, 2, -2):
        source = (slots + by).clamp(0, batch.num_slots - 1)
        inside = (source == slots + by) & batch.trainable[source]
        inside &= batch.segment[source] == batch.segment[slots]
        target, source = slots[inside], source[inside]
        if len(target) < FEWEST:
            continue
        trainer = logp_of(batch)[target]
        before = float((trainer - batch.logp_rollout[target]).abs().mean())
        after = float((trainer - batch.logp_rollout[source]).abs().mean())
        if before > 0.05 and after < EXPLAINED * before:
            moved = batch.logp_rollout.index_copy(0, target, batch.logp_rollout[source])
            kept = torch.zeros_like(batch.trainable).index_fill(0, target, True)
            return by, batch.replace(logp_rollout=moved, trainable=kept)
    return 0, batch


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """The gap after the weights of both sides were made equal."""

    explained: Explained  # of the first rollouts if the weights were not changed
    how: str  # description of the change
    scorer: PolicyScorer  # with the engine's weights
    model: ModelConfig  # source of these weights


def attribute(
    first: Explained,
    weights: EngineWeights,
    alone: Resampled,
    scales: dict[str, float],
    *,
    replay: bool,
) -> tuple[Waterfall, list[Ablation]]:
    """Return the waterfall of the gap and single ablations.

    first: both sides as they are. alone: the requests of the batch in `weights`, one at a time.
    scales: of the engine's static activations. replay: the rollout has routes.
    """
    equalised, scorer = weights.explained, weights.scorer
    rescorer, batch, config = equalised.rescorer, equalised.aligned, scorer.config
    given = first.native.support is not None

    def score(other: PolicyScorer) -> Tensor:
        return logp_of(rescorer.with_scorer(other)(batch, replay=replay))

    trainer = score(variant_scorer(scorer))
    rollout, quant = config.rollout, config.rollout.quant
    dtype = rollout.engine.dtype
    copy = load_engine_copy(weights.model, rollout, scorer.device, quantised=False)
    same = variant_scorer(scorer, model=copy, autocast="off")
    packed = score(same)
    steps = [
        _level("misaligned tokens", _describe_shift(first.shift), first.aligned),
        _level("stale weights", weights.how, equalised.aligned),
        _level("temperature", _describe_temperature(rescorer.factor), equalised.fitted),
    ]
    if given:
        steps.insert(0, _level(SUPPORT, OVER_SUPPORT, first.native))
    else:
        found = _level("sampling support", _describe_support(equalised), equalised.narrowed)
        steps.insert(2, found)
    last = logp_of(equalised.fitted)
    if replay:
        steps.append(_level("routing", "the trainer replays the rollout's routes", batch, trainer))
        last = trainer
    if dtype != config.model.dtype or config.train.autocast != "off":
        how = f"the trainer's forward on weights and activations in {dtype}, without autocast"
        steps.append(_level("precision", how, batch, packed))
        last = packed
    if quant is not None:
        quantised = load_engine_copy(weights.model, rollout, scorer.device)
        use_scales(quantised, scales)
        how = f"the trainer's forward on weights in {quant.format}, quantised as the engine's are"
        last = score(variant_scorer(scorer, model=quantised, autocast="off"))
        steps.append(_level("quantisation", how, batch, last))
    if alone.same.any() and equalised.shift == 0:
        how = _describe_alone(alone, batch)
        steps.append(_level("batch shape", how, batch.replace(logp_rollout=alone.logp), last))
    ablations = _ablations(score, trainer, packed, same, weights.model, batch)
    if alone.same.any():
        how = "k3 between the engine sampling one sequence at a time and all together, same tokens"
        noise = distance(alone.logp, alone.before, alone.same, equalised.native.segment)
        ablations.insert(0, Ablation("engine, one at a time", how, noise))
    start = _level("", "", first.native, first.native.logp_vocabulary)
    return waterfall(start, steps), ablations


def _ablations(
    score: Callable[[PolicyScorer], Tensor],
    trainer: Tensor,
    packed: Tensor,
    same: PolicyScorer,
    model: ModelConfig,
    batch: TokenBatch,
) -> list[Ablation]:
    """Measure the noise of packing and, below float32, of the vocabulary projection.

    same: a scorer of the copy in the engine's dtype; packed: its log-probabilities; trainer: those
    of the trainer.
    """
    engine, mask, segment = same.config.rollout.engine, batch.trainable, batch.segment
    single = variant_scorer(same, model=same.model, tokens_per_micro_batch=1)
    how = (
        "k3 between each sequence scored by itself and packed with others, on the trainer's kernels"
    )
    noise = distance(score(single), packed, mask, segment)
    ablations = [Ablation(f"{engine.dtype}, other packing", how, noise)]
    low_head = engine.dtype != "float32" and engine.lm_head == "same"
    if low_head and is_plain_linear(same.model.get_output_embeddings()):
        rollout = same.config.rollout
        exact_head = load_engine_copy(
            model, rollout, same.device, lm_head="float32", quantised=False
        )
        head = score(variant_scorer(same, model=exact_head))
        how = (
            f"fall of k3 between a {engine.dtype} forward and the trainer, with "
            "rollout.engine.lm_head=float32"
        )
        nats = excess(packed, head, trainer, mask, segment)
        ablations.append(Ablation("lm_head in float32", how, nats))
    return ablations


def trainer_precision(
    rescorer: Rescorer, model: ModelConfig, batch: TokenBatch, *, replay: bool
) -> Ablation:
    """Measure the nats that bfloat16 in the trainer adds to the gap.

    Its float32 weights are scored with and without autocast; bfloat16 weights are scored against a
    float32 forward of them. Where replay has combine weights too, both replay the experts alone:
    float32 weights do not go into a bfloat16 router.
    """
    scorer, config = rescorer.scorer, rescorer.scorer.config

    def score(other: PolicyScorer) -> Tensor:
        return logp_of(rescorer.with_scorer(other)(batch, replay=replay))

    if config.model.dtype == "float32":
        low, high = (
            variant_scorer(scorer, experts_only=True, autocast=name) for name in ("bfloat16", "off")
        )
        how = "nats that bf16 autocast in the trainer adds to the gap, against float32"
    else:
        low = variant_scorer(scorer, experts_only=True)
        rounded = load_model(model, torch.bfloat16, scorer.device)
        exact = cast_model(rounded, torch.float32)
        prepare_for_training(exact, scorer.device)
        high = variant_scorer(scorer, model=exact, experts_only=True, autocast="off")
        how = (
            "nats that the trainer's bfloat16 weights and activations add to the gap, against a "
            "float32 forward of them"
        )
    nats = excess(score(low), score(high), batch.logp_rollout, batch.trainable, batch.segment)
    return Ablation("trainer in bfloat16", how, nats)


def _level(name: str, how: str, batch: TokenBatch, logp: Tensor | None = None) -> Level:
    if logp is None:
        logp = logp_of(batch)
    return Level.of(name, how, logp, batch.logp_rollout, batch.trainable, batch.segment)


def _describe_alone(alone: Resampled, batch: TokenBatch) -> str:
    how = "the engine samples one sequence at a time"
    if int(alone.played.sum()) < batch.num_trainable:
        count = len(batch.segment[alone.played].unique())
        how += (
            f", in {count} of {batch.num_samples} sequences, the only ones that this bar can move"
        )
    return f"{how}; {alone.share:.0%} of their tokens come out the same"


def _describe_shift(shift: int) -> str:
    if shift == 0:
        return "no shift by a slot or two comes nearer: nothing changed"
    return (
        f"the engine's log-probabilities moved by {-shift:+d} slot, over the tokens that then have "
        "one"
    )


def _describe_support(explained: Explained) -> str:
    support = explained.rescorer.support
    if support:
        return f"the trainer's distribution cut to {support} and normalised again"
    if not explained.k3 >= HARMLESS_KL:  # also if it is NaN
        return f"not tried: what is left is not above {number(HARMLESS_KL)}"
    return "no top-k or top-p explains the gap: nothing changed"


def _describe_temperature(factor: float) -> str:
    if factor == 1:
        return "no other temperature explains the gap: nothing changed"
    return f"the trainer at {number(factor)} times its temperature"
