"""`onepolicy measure`: sample with the engine, score in the trainer, and explain the gap."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onepolicy.build.calibrate import calibrate, scales_of
from onepolicy.build.learner import load_training_model
from onepolicy.build.measure import MeasureComponents, build_measure_components, measure_config
from onepolicy.config import ModelConfig, RunConfig, UsageError
from onepolicy.config.input_files import resolve_model
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.policy import PolicyConfig, cached_policy_path
from onepolicy.measure.attribution import EngineWeights, attribute, explain, trainer_precision
from onepolicy.measure.bitwise import Bitwise, measure_bitwise
from onepolicy.measure.breakdowns import breakdowns_of, worst_tokens
from onepolicy.measure.distributions import check_top, compare, without_top
from onepolicy.measure.engine_noise import Resampled, sample, sample_again
from onepolicy.measure.result import Measurement, ScoredRollouts
from onepolicy.models.load import load_model, read_config
from onepolicy.notation import counted, number
from onepolicy.objective.advantages import compute_outcomes
from onepolicy.replay.checks import RoutingError
from onepolicy.run.hooks import compare_scorings, repeat_metrics
from onepolicy.run.make_policy import random_dense, tiny_policy
from onepolicy.support.checks import SupportError
from onepolicy.sync.push import push_weights
from onepolicy.train.pack import pack
from onepolicy.train.rescore import k3_of, mismatch_of, variant_scorer
from onepolicy.train.scorer import PolicyScorer
from onepolicy.verdict.bug_signatures import Diagnosis, diagnose_batch
from onepolicy.verdict.declared import HARMLESS_KL, declared_of
from onepolicy.verdict.row_faults import MarkOfRows
from onepolicy.verdict.rules import FEW_ROWS, REPLAY_HELPS, Verdict, quiet, verdict
from onepolicy.verdict.scored_tokens import EXPLAINED, Finding

Say = Callable[[str], None]
PROGRESS_LINES = 4  # of one sampling


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
    """Measure the gap of one model.

    tree: a recipe's settings, or empty. tiny: measure the cached tiny policy, or a random one of
    its shape. engine_model: a folder with weights for the engine, in place of the trainer's. dense:
    a dense model to measure on the same prompts for comparison; "tiny" makes a random one. top:
    number of the engine's likeliest tokens from which whole distributions are compared. say: called
    with a line at each stage.
    """
    with ExitStack() as stack:
        path = stack.enter_context(tiny_policy()) if tiny else None
        dense_path = stack.enter_context(random_dense()) if dense == "tiny" else dense
        config = measure_config(tree, overrides, path)
        if config.numerics == ON_POLICY:
            _refuse(**{"--engine-model": engine_model, "--dense": dense, "--top": top})
        dense_config = None
        if dense_path is not None:
            dense_config = _dense_config(tree, overrides, dense_path)
        parts, tokenizer = build_measure_components(config)
        name = _model_name(config, path)
        if config.numerics == ON_POLICY:
            say("sampling, scoring, and both again in other batches")
            return asyncio.run(measure_bitwise(parts, name))
        if top is not None:
            check_top(top, parts.engine.caps)
            sampling = dataclasses.replace(parts.sampling, top_logprobs=top)
            parts = dataclasses.replace(parts, sampling=sampling)
        model = resolve_model(config.model)
        found = asyncio.run(
            measure_parts(parts, tokenizer, model, engine_model=engine_model, say=say)
        )
        if path is not None:
            found = dataclasses.replace(found, model=name)
        if dense_config is None:
            return found
        say(f"{dense}: sampling and scoring")
        del parts  # memory may not hold two engines
        gc.collect()
        parts, _ = build_measure_components(dense_config)
        dense_name = str(dense)
        if dense == "tiny":
            dense_name = "random dense model"
        return dataclasses.replace(found, dense=(dense_name, asyncio.run(score_rollouts(parts))))


def _model_name(config: RunConfig, tiny_path: str | None) -> str:
    if tiny_path is None:
        return config.model.path
    if cached_policy_path(PolicyConfig()) == Path(tiny_path):
        return "the tiny policy"
    return "a random tiny policy"


def _refuse(**options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise UsageError(
                f"{option}: has no effect with numerics = on-policy, which compares bits; leave it "
                "out"
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
    """Measure with components that are built. Arguments are those of `measure_model`."""
    scorer, other = parts.scorer, None
    stop = parts.sampling.stop
    await calibrate(
        parts.config, parts.engine, parts.environment, stop, None, reprefill=parts.reprefill
    )
    if engine_model is not None:
        other = _load_engine_model(engine_model)
        await parts.engine.load_weights(other.state_dict().items(), parts.engine.version)
    rollout = parts.config.rollout
    say(f"sampling {rollout.prompts_per_step * rollout.group_size} sequences and scoring them")
    first = await score_rollouts(parts, say)
    say(f"k3 so far {number(first.found.k3)} nats a token")
    say("repeating forward passes in the trainer and in the engine")
    repeats = _repeats(scorer, first)
    together = await sample_again(parts, first.groups, first.native, alone=False)
    repeats |= _engine_repeats("all", together)
    chosen, weights, findings = first, _unchanged(first, scorer, model), first.diagnosis.findings
    if not first.found.k3 < HARMLESS_KL:  # true for NaN too
        say("giving the engine the trainer's weights and sampling again")
        await push_weights(scorer, *parts.samplers)
        second = await score_rollouts(parts, say)
        findings, stale = _with_fit(first), _stale(first, second)
        if stale is not None:
            chosen, findings = second, (stale, *_with_fit(second))
            how = "the engine got the trainer's weights and sampled the same problems again"
            weights = EngineWeights(second.explained, how, scorer, model)
            if other is not None:
                source = model.model_copy(update={"path": engine_model})
                weights = _score_with(first, scorer, source)
        if other is not None:
            await parts.engine.load_weights(other.state_dict().items(), parts.engine.version)
    say("the engine once more, one sequence at a time")
    base = chosen
    if other is not None:
        base = first
    alone = await sample_again(parts, base.groups, weights.explained.native, alone=True)
    repeats |= _engine_repeats("alone", alone)
    say("scoring the same tokens with one thing changed at a time")
    replay = chosen.replayed is not None
    scales = scales_of(parts.engine)
    fall, ablations = attribute(first.explained, weights, alone, scales, replay=replay)
    if not weights.explained.rescorer.support:  # rounding moves tokens over the edge of a support
        rescorer = weights.explained.rescorer.with_scorer(weights.scorer)
        ablations.append(
            trainer_precision(rescorer, weights.model, weights.explained.aligned, replay=replay)
        )
    distribution = None
    if first.top is not None:
        distribution = compare(*first.top, tokenizer)
    return Measurement(
        model.path,
        parts.config,
        first,
        fall,
        ablations,
        repeats,
        breakdowns_of(first.native, tokenizer, stop),
        worst_tokens(first.native, tokenizer),
        _verdict(first, findings, chosen.routes, config=parts.config, dense=scorer.routers is None),
        distribution,
    )


def _verdict(
    first: ScoredRollouts,
    findings: tuple[Finding, ...],
    routes: str,
    *,
    config: RunConfig,
    dense: bool,
) -> Verdict:
    gap, replayed, routers, unchecked = first.found, None, None, []
    if first.replayed is not None:
        replayed = mismatch_of(first.replayed)
    if dense:
        routers = 0.0
    if gap.sequences < FEW_ROWS and not quiet(gap):
        unchecked.append(
            f"{counted(gap.sequences, 'sequence')}, too few to see a part of them that is "
            f"wrong: sample {FEW_ROWS} or more (rollout.prompts_per_step, rollout.group_size)"
        )
    return verdict(
        gap,
        _diagnosis(first, findings),
        replayed=replayed,
        routers=routers,
        routes=routes,
        declared=declared_of(config.model_dump()),
        unchecked=unchecked,
    )


async def score_rollouts(parts: MeasureComponents, say: Say = lambda text: None) -> ScoredRollouts:
    """Sample the same problems with the same seeds and score them.

    `say` gets PROGRESS_LINES lines while the engine samples.
    """
    rollout = parts.config.rollout
    groups = await sample(
        parts, advance=_progress(say, rollout.prompts_per_step * rollout.group_size)
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
        except (RoutingError, SupportError) as error:
            routes = str(error)
    top = None
    if parts.sampling.top_logprobs:
        top = native, replayed
        native = without_top(native)
        if replayed is not None:
            replayed = without_top(replayed)
    explained, diagnosis = explain(scorer, native), diagnose_batch(native)
    if parts.config.rollout.pressure is not None and replayed is not None:
        # Noise on routes has many marks of bugs. A bug beside it stays where they are replayed.
        beside = diagnose_batch(replayed)
        diagnosis = Diagnosis(diagnosis.gap, beside.findings, beside.marks)
    return ScoredRollouts(groups, native, replayed, routes, explained, diagnosis, top)


def _progress(say: Say, total: int) -> Callable[[], None]:
    """Return a function to call for every sampled sequence; it says PROGRESS_LINES lines."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done * PROGRESS_LINES // total > (done - 1) * PROGRESS_LINES // total:
            say(f"sampled {done} of {counted(total, 'sequence')}")

    return advance


def _unchanged(first: ScoredRollouts, scorer: PolicyScorer, model: ModelConfig) -> EngineWeights:
    """Return the engine's weights as they are: syncing them was not tried, or explains little."""
    how = (
        "the trainer's weights in the engine leave more than a quarter of the gap: nothing changed"
    )
    if first.found.k3 < HARMLESS_KL:
        how = f"not tried: the gap is below {number(HARMLESS_KL)}"
    return EngineWeights(first.explained, how, scorer, model)


def _score_with(first: ScoredRollouts, scorer: PolicyScorer, model: ModelConfig) -> EngineWeights:
    """Score the first rollouts in the trainer with the weights that the engine held."""
    with _given_as("--engine-model"):
        other = load_training_model(model, scorer.device)
    other_scorer = variant_scorer(scorer, model=other)
    explained = explain(other_scorer, other_scorer.score(first.native, replay=False))
    how = f"the trainer scores with the engine's weights, {model.path}"
    return EngineWeights(explained, how, other_scorer, model)


def _load_engine_model(folder: str) -> PreTrainedModel:
    """Return the model in float32 on the CPU, from where it is pushed to the engine."""
    source = ModelConfig(path=folder)
    with _given_as("--engine-model"):
        read_config(source)
        return load_model(source, torch.float32, torch.device("cpu"))


@contextmanager
def _given_as(option: str) -> Iterator[None]:
    """Name the command-line option, not model.path, in errors about the model."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", option, 1)) from error


def _diagnosis(first: ScoredRollouts, findings: tuple[Finding, ...]) -> Diagnosis:
    """Return the findings with the marks of the scoring without replay, or else those with replay.

    Without the noise of routing, replay may show marks that routing hides. Where replay takes the
    gap off, a few rows that held it are those whose routes differ most. Marks of places stay: a
    router that is wrong from some token on acts through the routes, too.
    """
    marks = first.diagnosis.marks
    if first.replayed is not None and first.found.k3 > REPLAY_HELPS * k3_of(first.replayed):
        marks = tuple(mark for mark in marks if not isinstance(mark, MarkOfRows))
    if first.replayed is not None and not marks:
        replayed = diagnose_batch(first.replayed)
        named = (f"{found.cause}: {found.evidence}" for found in replayed.findings)
        marks = (*replayed.marks, *named)
        marks = tuple(f"with the rollout's routes replayed {text}" for text in marks)
    return Diagnosis(first.diagnosis.gap, findings, marks)


def _stale(first: ScoredRollouts, second: ScoredRollouts) -> Finding | None:
    """Return a `stale` finding if syncing weights closed the gap.

    Both are compared at their best-fit temperature, so a temperature bug is not counted here.
    """
    before, after = first.explained.k3, second.explained.k3
    if not (before >= HARMLESS_KL and after <= EXPLAINED * before):  # false for NaN
        return None
    return Finding(
        "stale",
        f"k3 falls from {number(before)} to {number(after)} nats a token once the engine gets the "
        "trainer's weights and samples the same problems again: it held other weights",
    )


def _with_fit(scored: ScoredRollouts) -> tuple[Finding, ...]:
    """Return the findings, and the temperature or support if scoring with it closes the gap."""
    findings, why = scored.diagnosis.findings, scored.explained
    before, after = k3_of(why.aligned), why.k3
    closes = before >= HARMLESS_KL and after < EXPLAINED * before
    if "retokenised" in {f.cause for f in findings} or not closes:
        return findings
    drop = f"k3 falls from {number(before)} to {number(after)} nats a token if the trainer scores "
    fitted = tuple(f for f in findings if f.cause not in ("temperature", "support"))
    if why.rescorer.support:
        # If one token is left, its log-probability is 0, which is no fill value. If two are left,
        # the sum of what was cut differs from token to token, which looks like a factor that does.
        fitted = tuple(f for f in fitted if f.cause not in ("fill", "scale"))
        fitted += (Finding("support", f"{drop}over {why.rescorer.support} of its distribution"),)
        before = k3_of(why.narrowed)
    if why.rescorer.factor != 1 and before >= HARMLESS_KL and after < EXPLAINED * before:
        fitted += (
            Finding("temperature", f"{drop}at {number(why.rescorer.factor)} times its temperature"),
        )
    return fitted


def _repeats(scorer: PolicyScorer, scored: ScoredRollouts) -> dict[str, float]:
    """Return the trainer's variation between two forwards (R3 paper, section 3.3)."""
    native = scored.native
    if scored.replayed is not None:
        return repeat_metrics(scorer, scored.replayed, native)
    order = list(range(native.num_samples))[::-1]
    again = variant_scorer(scorer).score(native.select(order), replay=False).select(order)
    return {
        f"counterfactual/{name}": value for name, value in compare_scorings(native, again).items()
    }


def _engine_repeats(name: str, again: Resampled) -> dict[str, float]:
    named = again.metrics | {"same": again.share}
    return {f"engine_{name}/{key.removeprefix('repeat/')}": value for key, value in named.items()}
