"""`onepolicy measure`: sample with the engine, score in the trainer, say how far apart they are, and why."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onepolicy.build.calibrate import calibrate
from onepolicy.build.components import MeasureComponents, build_measure_components
from onepolicy.build.learner import resolve_model
from onepolicy.build.measure_settings import measure_config
from onepolicy.config import ModelConfig, RunConfig, UsageError
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.policy import PolicyConfig, cached_path
from onepolicy.measure.attribution import Weights, attribute, explain, trainer_precision
from onepolicy.measure.bitwise import Bitwise, measure_bitwise
from onepolicy.measure.breakdowns import where
from onepolicy.measure.distributions import check_top, compare, without_top
from onepolicy.measure.engine_noise import Again, sample, sample_again
from onepolicy.measure.result import Look, Measurement
from onepolicy.models.load import load_model, read_config
from onepolicy.models.prepare import prepare_for_training
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.replay.checks import RoutingError
from onepolicy.run.make_policy import random_dense, tiny_policy
from onepolicy.run.step_metrics import compare_scorings, repeat_metrics
from onepolicy.sync.check import push_weights
from onepolicy.train.pack import pack
from onepolicy.train.rescore import gap_of, k3_of, variant
from onepolicy.train.scorer import PolicyScorer
from onepolicy.verdict.bug_signatures import Diagnosis, diagnose_batch
from onepolicy.verdict.rules import HARMLESS_KL, verdict
from onepolicy.verdict.scored_tokens import EXPLAINED, Finding

Say = Callable[[str], None]
TOLD = 4  # times that a sampling says how far it is


def measure_model(
    tree: dict[str, Any],
    overrides: list[str],
    *,
    tiny: bool = False,
    engine_model: str | None = None,
    dense: str | None = None,
    top: int | None = None,
    say: Say = lambda text: None,
) -> Measurement | Bitwise:
    """`tree`: a recipe's settings, or none; tiny: the tiny policy, or a random one of its shape if none is cached.

    engine_model: a folder whose weights the engine gets in place of the trainer's (a checkpoint it is suspected of).
    dense: a dense model measured on the same prompts, to stand beside it; `tiny`: a random one. top: how many of the
    engine's likeliest tokens whole distributions are compared from. `say` hears each stage.
    """
    with (
        tiny_policy() if tiny else _nothing() as path,
        random_dense() if dense == "tiny" else _nothing() as made,
    ):
        config = measure_config(tree, overrides, path)
        if config.numerics == ON_POLICY:
            _refuse(**{"--engine-model": engine_model, "--dense": dense, "--top": top})
        beside = None if dense is None else _dense_config(tree, overrides, made or dense)
        parts, tokenizer = build_measure_components(config)
        cached = path is not None and cached_path(PolicyConfig()) == Path(path)
        name = (
            config.model.path
            if path is None
            else "the tiny policy"
            if cached
            else "a random tiny policy"
        )
        if config.numerics == ON_POLICY:
            say("sampling, scoring, and both again in other batches")
            return asyncio.run(measure_bitwise(parts, name))
        if top is not None:
            check_top(top, parts.engine.caps)
            parts = dataclasses.replace(parts, top_logprobs=top)
        model = resolve_model(config.model)
        found = asyncio.run(
            measure_parts(parts, tokenizer, model, engine_model=engine_model, say=say)
        )
        found = found if path is None else dataclasses.replace(found, model=name)
        if beside is None:
            return found
        say(f"{dense}: sampling and scoring")
        del parts  # two engines at once may not fit
        gc.collect()
        parts, _ = build_measure_components(beside)
        name = "random dense model" if made else str(dense)
        return dataclasses.replace(found, dense=(name, asyncio.run(look(parts))))


def _refuse(**options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(
                f"{option}: has no effect with numerics = on-policy, which compares bits; leave it out"
            )


def _dense_config(tree: dict[str, Any], overrides: list[str], path: str) -> RunConfig:
    with _given_as("--dense"):
        config = measure_config(tree, [*overrides, f"model.path={path}"], None)
    if config.replay.mode != "off":
        raise UsageError(f"--dense: {path} is a mixture of experts; give a dense model")
    return config


async def measure_parts(
    parts: MeasureComponents,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    *,
    engine_model: str | None = None,
    say: Say = lambda text: None,
) -> Measurement:
    scorer, other = parts.scorer, None
    await calibrate(parts.config, parts.engine, parts.environment, parts.stop, None)
    if engine_model is not None:
        other = _open(engine_model)
        await parts.engine.load_weights(other.state_dict().items(), parts.engine.version)
    rollout = parts.config.rollout
    say(f"sampling {rollout.prompts_per_step * rollout.group_size} sequences and scoring them")
    first = await look(parts, say)
    say(f"k3 so far {first.found.k3:.2g} nats a token")
    say("repeating forward passes in the trainer and in the engine")
    repeats = _repeats(scorer, first)
    repeats |= _engine("all", await sample_again(parts, first.groups, first.native, alone=False))
    chosen, weights, findings = first, _untouched(first, scorer, model), first.diagnosis.findings
    if not first.found.k3 < HARMLESS_KL:  # also if it is NaN
        say("giving the engine the trainer's weights and sampling again")
        await push_weights(scorer, *parts.samplers)
        second = await look(parts, say)
        findings = _beyond(first)
        if (stale := _stale(first, second)) is not None:
            chosen, findings = second, (stale, *_beyond(second))
            how = "the engine got the trainer's weights and sampled the same problems again"
            weights = Weights(second.explained, how, scorer, model)
            if other is not None:
                weights = _scored_by(
                    other, first, scorer, model.model_copy(update={"path": engine_model})
                )
                await parts.engine.load_weights(other.state_dict().items(), parts.engine.version)
    say("the engine once more, one sequence at a time")
    base = first if other is not None else chosen
    alone = await sample_again(parts, base.groups, weights.explained.native, alone=True)
    repeats |= _engine("alone", alone)
    say("scoring the same tokens with one thing changed at a time")
    replay = chosen.replayed is not None
    fall, each_alone = attribute(first.explained, weights, alone, replay=replay)
    if (
        not weights.explained.rescorer.support
    ):  # at the edge of a support, rounding puts tokens out of it
        rescorer = weights.explained.rescorer.of(weights.scorer)
        each_alone.append(
            trainer_precision(rescorer, weights.model, weights.explained.aligned, replay=replay)
        )
    said = verdict(
        gap_of(first.native),
        _told(first, findings),
        replayed=None if first.replayed is None else gap_of(first.replayed),
        routers=0.0 if scorer.routers is None else None,
        routes=chosen.routes,
    )
    breakdowns, worst = where(first.native, tokenizer, parts.stop)
    whole = None if first.top is None else compare(*first.top, tokenizer)
    return Measurement(
        model.path, parts.config, first, fall, each_alone, repeats, breakdowns, worst, said, whole
    )


async def look(parts: MeasureComponents, say: Say = lambda text: None) -> Look:
    """Sample the same problems with the same seeds, and score them. `say` hears how far the sampling is."""
    rollout = parts.config.rollout
    groups = await sample(
        parts, advance=_telling(say, rollout.prompts_per_step * rollout.group_size)
    )
    if parts.reprefill is not None:
        groups = parts.reprefill.fill(groups)
    max_tokens = parts.config.rollout.sampling.max_tokens
    batch = pack(compute_outcomes(groups, parts.config.objective, max_tokens=max_tokens))
    scorer = parts.scorer
    native = scorer.score(batch, replay=False)
    replayed, routes = None, ""
    if scorer.routers is not None:
        try:
            replayed = scorer.score(batch)
        except RoutingError as error:
            routes = str(error)
    top = None
    if parts.top_logprobs:
        top = native, replayed
        native, replayed = without_top(native), None if replayed is None else without_top(replayed)
    return Look(
        groups, native, replayed, routes, explain(scorer, native), diagnose_batch(native), top
    )


def _telling(say: Say, total: int) -> Callable[[], None]:
    """What counts the sequences that are sampled, and says it TOLD times."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * TOLD // total > (done - 1) * TOLD // total:
            say(f"sampled {done} of {total} sequences")

    return advance


def _untouched(seen: Look, scorer: PolicyScorer, model: ModelConfig) -> Weights:
    small = seen.found.k3 < HARMLESS_KL
    how = (
        f"not tried below {HARMLESS_KL:g}"
        if small
        else "the trainer's weights in the engine change little: nothing"
    )
    return Weights(seen.explained, how, scorer, model)


def _scored_by(
    other: PreTrainedModel, first: Look, scorer: PolicyScorer, model: ModelConfig
) -> Weights:
    """The first look's own tokens, scored in the trainer by the weights that the engine held."""
    prepare_for_training(other, scorer.device)
    with_others = variant(scorer, model=other)
    seen = explain(with_others, with_others.score(first.native, replay=False))
    return Weights(
        seen, f"the trainer scores with the engine's weights, {model.path}", with_others, model
    )


def _open(folder: str) -> PreTrainedModel:
    source = ModelConfig(path=folder)
    with _given_as("--engine-model"):
        read_config(source)
        return load_model(source, torch.float32, torch.device("cpu"))


@contextmanager
def _given_as(option: str) -> Iterator[None]:
    """What is wrong with a model is said of the option that named it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", option, 1)) from error


def _told(first: Look, findings: tuple[Finding, ...]) -> Diagnosis:
    """What the scoring without replay shows; else what shows with replay, once the noise of routing is gone."""
    marks = first.diagnosis.marks
    if first.replayed is not None and not marks:
        left = diagnose_batch(first.replayed)
        marks = (*left.marks, *(f"{found.cause}: {found.evidence}" for found in left.findings))
        marks = tuple(f"with the rollout's routes replayed {text}" for text in marks)
    return Diagnosis(first.diagnosis.gap, findings, marks)


def _stale(first: Look, second: Look) -> Finding | None:
    """Did giving the engine the trainer's weights close the gap? At the best temperature of each: that is apart."""
    before, after = first.explained.k3, second.explained.k3
    if not (before >= HARMLESS_KL and after <= EXPLAINED * before):  # NaN accuses nobody
        return None
    return Finding(
        "stale",
        f"k3 falls from {before:.3g} to {after:.3g} nats a token once the engine is given the trainer's weights and "
        "samples the same problems again: it held others",
    )


def _beyond(seen: Look) -> tuple[Finding, ...]:
    """The findings of the log-probabilities, and the temperature or support if scoring with it closes the gap."""
    findings, why = seen.diagnosis.findings, seen.explained
    before, after = k3_of(why.aligned), why.k3
    closes = before >= HARMLESS_KL and after < EXPLAINED * before
    if "retokenised" in {f.cause for f in findings} or not closes:
        return findings
    drop = f"k3 falls from {before:.3g} to {after:.3g} nats a token if the trainer scores "
    fitted = tuple(f for f in findings if f.cause not in ("temperature", "support"))
    if (
        why.rescorer.support
    ):  # one token left of the distribution has log-probability 0: nothing was filled in
        fitted = tuple(f for f in fitted if f.cause != "fill")
        fitted += (Finding("support", f"{drop}over {why.rescorer.support} of its distribution"),)
        before = k3_of(why.narrowed)
    if why.rescorer.factor != 1 and before >= HARMLESS_KL and after < EXPLAINED * before:
        fitted += (
            Finding("temperature", f"{drop}at {why.rescorer.factor:.2f} times its temperature"),
        )
    return fitted


def _repeats(scorer: PolicyScorer, seen: Look) -> dict[str, float]:
    """Variation of the trainer with itself, with replay and without (R3 paper, section 3.3)."""
    if seen.replayed is not None:
        return repeat_metrics(scorer, seen.replayed, seen.native)
    order = list(range(seen.native.num_samples))[::-1]
    again = variant(scorer).score(seen.native.select(order), replay=False).select(order)
    return {
        f"counterfactual/{name}": value
        for name, value in compare_scorings(seen.native, again).items()
    }


def _engine(name: str, again: Again) -> dict[str, float]:
    named = again.metrics | {"same": again.share}
    return {f"engine_{name}/{key.removeprefix('repeat/')}": value for key, value in named.items()}


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
