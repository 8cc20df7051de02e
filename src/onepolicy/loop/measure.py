"""`onepolicy measure`: sample with the engine, score in the trainer, say how far apart they are, and why."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onepolicy.config import FromRollout, ModelConfig, RunConfig, UsageError, resolve
from onepolicy.config.policy import PolicyConfig
from onepolicy.correct.diagnose import EXPLAINED, Diagnosis, Finding, preflight
from onepolicy.correct.verdict import HARMLESS_KL, Gap, Verdict, verdict
from onepolicy.envs import alphabet
from onepolicy.envs.render import decode
from onepolicy.loop.causes import Alone, attribute, fit_temperature, variant
from onepolicy.loop.probe import measure, per_layer, repeat, save_probe, variation
from onepolicy.loop.setup import build_parts, resolve_model
from onepolicy.loop.step import Parts
from onepolicy.measure.attribution import Waterfall
from onepolicy.measure.breakdown import CLASSES, PLACES, PROBABILITIES, Row, WorstToken, by_edges, by_label, places
from onepolicy.measure.breakdown import token_class as class_of
from onepolicy.measure.logprob import Mismatch, mismatch
from onepolicy.models.load import load_model, read_config
from onepolicy.objective.advantages import outcomes
from onepolicy.replay.checks import RoutingError, is_moe
from onepolicy.rollout.collect import collect
from onepolicy.sync.local import push_weights
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
from onepolicy.train.policy import cached_path, make_model, make_tokenizer, save_policy
from onepolicy.types import TokenBatch

WORST = 20
BEFORE = 24  # tokens shown ahead of a worst one


@dataclass(frozen=True, slots=True)
class Look:
    """One batch of rollouts, scored."""

    native: TokenBatch  # without replay
    replayed: TokenBatch | None  # None: a dense model, or routes that were refused
    routes: str  # why they were refused
    factor: float  # by which the trainer's temperature comes closest to the rollout
    fitted: TokenBatch  # without replay, at that temperature
    diagnosis: Diagnosis

    @property
    def found(self) -> Mismatch:
        return _mismatch(self.native)


@dataclass(frozen=True, slots=True)
class Measurement:
    model: str
    config: RunConfig
    look: Look
    waterfall: Waterfall
    alone: list[Alone]
    repeats: dict[str, float]
    breakdowns: dict[str, list[Row]]
    worst: list[WorstToken]
    verdict: Verdict


def measure_model(tree: dict[str, Any], overrides: list[str], *, tiny: bool, engine_model: str | None) -> Measurement:
    """`tree`: a recipe's settings, or none; tiny: the tiny policy, or a random one of its shape if none is cached.

    engine_model: a folder whose weights the engine gets in place of the trainer's (a checkpoint it is suspected of).
    """
    with _tiny_policy() if tiny else _nothing() as path:
        config = measure_config(tree, overrides, path)
        parts, tokenizer = build_parts(config)
        model = resolve_model(config.model)
        return asyncio.run(measure_parts(parts, tokenizer, model, engine_model=engine_model))


def measure_config(tree: dict[str, Any], overrides: list[str], path: str | None) -> RunConfig:
    """A run's settings; what only training uses is left out. A dense model is measured without replay."""
    small = {"prompts_per_step": 10, "group_size": 2, "sampling": {"max_tokens": 96}}
    tree = dict[str, Any]({"task": {"kind": "chain"}, "rollout": small, "replay": {"mode": "r3"}}) | tree
    tree |= {"out": "unused", "steps": 1, "eval": {"every": 0}, "log": {"report": False, "tensorboard": False}}
    if path is not None:
        tree["model"] = tree.get("model", {}) | {"path": path}
    config = resolve(tree, overrides)
    if not is_moe(read_config(resolve_model(config.model))):
        return resolve(tree | {"replay": {"mode": "off"}}, overrides)
    if not isinstance(config.replay, FromRollout):
        raise UsageError(
            f"replay.mode: {config.replay.mode}, but measure scores with the rollout's routes and without; leave it out"
        )
    return config


async def measure_parts(
    parts: Parts, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, engine_model: str | None = None
) -> Measurement:
    if engine_model is not None:
        other = _open(engine_model)
        await parts.engine.load_weights(other.state_dict().items(), parts.engine.version)
    learner = parts.learner
    assert isinstance(learner, LocalLearner)
    first = await look(parts, learner)
    findings, routes = first.diagnosis.findings, first.routes
    if first.found.k3 >= HARMLESS_KL:
        await push_weights(learner, *parts.samplers)
        second = await look(parts, learner)
        if (stale := _stale(first, second)) is not None:
            findings, routes = (stale, *_beyond(second)), second.routes
        else:
            findings = _beyond(first)
    fall, alone = attribute(learner, first.native, first.fitted, first.factor, model, replay=first.replayed is not None)
    said = verdict(
        gap(first.native),
        Diagnosis(first.diagnosis.gap, findings),
        replayed=None if first.replayed is None else gap(first.replayed),
        routers=0.0 if learner.routers is None else None,
        routes=routes,
    )
    breakdowns, worst = where(first.native, tokenizer, parts.stop)
    repeats = _repeats(learner, first)
    return Measurement(model.path, parts.config, first, fall, alone, repeats, breakdowns, worst, said)


def _open(folder: str) -> PreTrainedModel:
    source = ModelConfig(path=folder)
    try:
        read_config(source)
        return load_model(source, torch.float32, torch.device("cpu"))
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "--engine-model", 1)) from error


async def look(parts: Parts, learner: LocalLearner) -> Look:
    """Sample the same problems with the same seeds, and score them."""
    config = parts.config
    groups, _ = await collect(
        parts.engine,
        parts.environment,
        config.rollout,
        stop=parts.stop,
        step=0,
        seed=config.seed,
        routes=parts.routes,
    )
    if parts.reprefill is not None:
        groups = parts.reprefill.fill(groups)
    batch = pack(outcomes(groups, config.objective, max_tokens=config.rollout.sampling.max_tokens))
    native = learner.score_without_replay(batch)
    replayed, routes = None, ""
    if learner.routers is not None:
        try:
            replayed = learner.score_again(batch)
        except RoutingError as error:
            routes = str(error)
    factor, fitted = fit_temperature(learner, native)
    return Look(native, replayed, routes, factor, fitted, preflight(native))


def _stale(first: Look, second: Look) -> Finding | None:
    """Did giving the engine the trainer's weights close the gap? At the best temperature of each: that is apart."""
    before, after = _mismatch(first.fitted).k3, _mismatch(second.fitted).k3
    if before < HARMLESS_KL or after > EXPLAINED * before:
        return None
    return Finding(
        "stale",
        f"k3 falls from {before:.3g} to {after:.3g} nats a token once the engine is given the trainer's weights and "
        "samples the same problems again: it held others",
    )


def _beyond(seen: Look) -> tuple[Finding, ...]:
    """The findings of the log-probabilities, and the temperature if scoring at the fitted one closes the gap."""
    findings = seen.diagnosis.findings
    before, after = seen.found.k3, _mismatch(seen.fitted).k3
    named = {f.cause for f in findings}
    if before >= HARMLESS_KL and after < EXPLAINED * before and not named & {"shift", "retokenised", "temperature"}:
        text = (
            f"k3 falls from {before:.3g} to {after:.3g} nats a token if the trainer scores at {seen.factor:.2f} times "
        )
        findings = (*(f for f in findings if f.cause != "support"), Finding("temperature", text + "its temperature"))
    return findings


def _repeats(learner: LocalLearner, seen: Look) -> dict[str, float]:
    """Variation of the trainer with itself, with replay and without (R3 paper, section 3.3)."""
    if seen.replayed is not None:
        return repeat(learner, seen.replayed, seen.native)
    order = list(range(seen.native.num_samples))[::-1]
    again = variant(learner).score_without_replay(seen.native.select(order)).select(order)
    return {f"counterfactual/{name}": value for name, value in variation(seen.native, again).items()}


def where(
    batch: TokenBatch, tokenizer: PreTrainedTokenizerBase, stop: tuple[int, ...]
) -> tuple[dict[str, list[Row]], list[WorstToken]]:
    """Breakdowns of the batch's gap, and its worst tokens in their text."""
    mask = batch.trainable
    assert batch.logp_old is not None
    assert batch.entropy is not None
    trainer, rollout, place = batch.logp_old[mask], batch.logp_rollout[mask], places(mask, batch.segment)
    targets = batch.target_ids[mask].tolist()
    texts = {token: decode(tokenizer, [token]) for token in set(targets)}
    labels = torch.tensor([class_of(texts[token], end=token in stop) for token in targets])
    breakdowns = {
        "place in the response": by_edges(trainer, rollout, place, PLACES),
        "rollout probability": by_edges(trainer, rollout, rollout.exp(), PROBABILITIES),
        "trainer entropy, nats": by_edges(trainer, rollout, batch.entropy[mask], (0.0, 0.1, 0.5, 1.0, 2.0)),
        "class of token": by_label(trainer, rollout, labels, CLASSES),
    }
    slots = mask.nonzero()[:, 0]
    worst = []
    for i in (trainer - rollout).abs().argsort(descending=True)[:WORST].tolist():
        slot, sequence = int(slots[i]), int(batch.segment[slots[i]])
        start = max(int(batch.cu_seqlens[sequence]), slot + 1 - BEFORE)
        before = decode(tokenizer, batch.input_ids[start : slot + 1].tolist())
        odds = float(rollout[i].exp()), float(trainer[i].exp())
        worst.append(WorstToken(sequence, int(place[i]), before, texts[targets[i]], *odds))
    return breakdowns, worst


def to_tree(found: Measurement) -> dict[str, Any]:
    """JSON-ready: what report/measure.py draws and prints."""
    seen = found.look
    return {
        "model": found.model,
        "tokens": seen.found.tokens,
        "sequences": seen.native.num_samples,
        "temperature_factor": seen.factor,
        "verdict": dataclasses.asdict(found.verdict),
        "waterfall": dataclasses.asdict(found.waterfall),
        "alone": [dataclasses.asdict(each) for each in found.alone],
        "metrics": numbers(found),
        "breakdowns": {name: [dataclasses.asdict(r) for r in rows] for name, rows in found.breakdowns.items()},
        "worst": [dataclasses.asdict(each) for each in found.worst],
        "config": found.config.model_dump(mode="json"),
    }


def write(found: Measurement, out: Path) -> None:
    """OUT/measure.json, and OUT/probes, the tensors the figures are drawn from."""
    out.mkdir(parents=True, exist_ok=True)
    seen = found.look
    trained, plain = (seen.native, None) if seen.replayed is None else (seen.replayed, seen.native)
    save_probe(out / "probes" / "step_00000.safetensors", trained, plain)
    (out / "measure.json").write_text(json.dumps(to_tree(found), indent=1), encoding="utf-8")


def numbers(found: Measurement) -> dict[str, dict[str, float]]:
    """Every metric of both scorings, by the names of loop/metrics.py."""
    seen = found.look
    out = {"without_replay": measure(seen.native) | per_layer(seen.native)}
    if seen.replayed is not None:
        out["with_replay"] = measure(seen.replayed) | per_layer(seen.replayed)
    return out | {"repeated_forward": found.repeats}


def gap(batch: TokenBatch) -> Gap:
    """Of a scored batch, for the verdict."""
    found = _mismatch(batch)
    f2, f5 = found.extreme([2.0, 5.0])
    return Gap(found.tokens, batch.num_samples, found.k3, f2, f5, found.max_dlogp)


def _mismatch(batch: TokenBatch) -> Mismatch:
    assert batch.logp_old is not None
    return mismatch(batch.logp_old, batch.logp_rollout, batch.trainable, segment=batch.segment)


@contextmanager
def _tiny_policy() -> Iterator[str]:
    config = PolicyConfig()
    path = cached_path(config)
    if path.is_dir():
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(alphabet(config.task))
        path = Path(folder) / "random-policy"
        save_policy(make_model(config, len(tokenizer)), tokenizer, config, path)
        yield str(path)


@contextmanager
def _nothing() -> Iterator[None]:
    yield None
