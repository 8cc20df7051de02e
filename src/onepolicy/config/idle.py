"""Settings that change nothing beside the others. They never stop a run, so that sweeps work.

A rule is a small function of the sections it reads, which yields the idle ones among the settings
that were set. A value that is a default or comes from a preset is never reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onepolicy.config.base import Frozen
from onepolicy.config.cluster import ClusterConfig, RayCluster
from onepolicy.config.correction import LOSS_TERMS, CorrectionConfig
from onepolicy.config.engine import (
    EngineConfig,
    HFEngineConfig,
    ServerEngineConfig,
    SGLangConfig,
    VLLMEngineConfig,
)
from onepolicy.config.model import ModelConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.objective import GROUP_BASELINES, KLConfig, ObjectiveConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.replay import R2, ReplayConfig, RolloutReplay
from onepolicy.config.rollout import EvalConfig, RolloutConfig
from onepolicy.config.run import RunConfig
from onepolicy.config.task import EpisodeTask, TaskConfig
from onepolicy.errors import printable, short_repr

CLIPPING_SURROGATES = ("ppo", "cispo", "gmpo")
RATIO_BOUNDS = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Settings of the surrogate that do nothing where its ratio is 1."""


class Idle(NamedTuple):
    """A setting that changes nothing, and why."""

    setting: str  # dotted path
    value: object
    reason: str  # the setting beside it


def describe_idle(settings: list[Idle]) -> str:
    """Return one line that names the idle settings: `no effect here: A = 1 (why); B = 2 (why)`."""
    listed = (f"{each.setting} = {_written(each.value)} ({each.reason})" for each in settings)
    return f"no effect here: {'; '.join(listed)}"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return short_repr(list(value))
    return printable(str(value))[:100]


def idle_settings(run: RunConfig) -> list[Idle]:
    """Return the settings of a run that change nothing, each once, in the order of sections."""
    found = [
        *_model(run.model, run.train),
        *_engine(run),
        *_replay(run.replay, run.objective),
        *_replay_of_single_turns(run.replay, run.task, run.rollout.engine),
        *_correction(run.correction, run.objective),
        *_correction_on_policy(run),
        *_advantages(run.objective),
        *_surrogate(run.objective),
        *_kl(run.objective.kl),
        *_single_update(run),
        *_train(run.train, run.correction),
        *_logits_on_policy(run),
        *_cluster(run.cluster),
        *_evaluation(run.eval, run.rollout),
        *_pressure(run.rollout),
    ]
    unique: dict[str, Idle] = {}
    for idle in found:
        unique.setdefault(idle.setting, idle)
    return list(unique.values())


def idle_engine_settings(engine: EngineConfig, section: str = "") -> Iterator[Idle]:
    """Yield the settings of an engine that change nothing. section: their path, with a dot."""
    if engine.lm_head == "float32" and engine.dtype == "float32":
        yield Idle(f"{section}lm_head", engine.lm_head, f"{section}dtype = float32")
    if isinstance(engine, ServerEngineConfig) and engine.sync != "disk":
        yield from _set_among(("sync_dir",), engine, section, f"{section}sync = {engine.sync}")
    elif isinstance(engine, ServerEngineConfig):
        yield from _set_among(("bucket_mib",), engine, section, f"{section}sync = disk")


def idle_policy_settings(policy: PolicyConfig) -> Iterator[Idle]:
    """Yield the settings of make-policy that change nothing."""
    if not policy.mistakes:
        yield from _set_among(("mistakes_from",), policy, "", "mistakes = 0")


def _set_among(
    names: tuple[str, ...], section: Frozen, path: str, reason: str, usual: Frozen | None = None
) -> Iterator[Idle]:
    """Yield those of these settings that are not as usual.

    path: of the section, with a dot. usual: the section with a preset's values; None: the defaults.
    """
    for name in names:
        value = getattr(section, name)
        expected = section.default_of(name)
        if usual is not None:
            expected = getattr(usual, name)
        if value != expected:
            yield Idle(f"{path}{name}", value, reason)


def _model(model: ModelConfig, train: TrainConfig) -> Iterator[Idle]:
    if model.dtype == "float32" and train.autocast == "off":
        reason = "model.dtype = float32, train.autocast = off"
        yield from _set_among(("lm_head",), model, "model.", reason)


def _engine(run: RunConfig) -> Iterator[Idle]:
    lora, engine = run.train.lora, run.rollout.engine
    adapters = lora is not None and lora.sync == "native" and isinstance(engine, SGLangConfig)
    for idle in idle_engine_settings(engine, "rollout.engine."):
        follows_model = run.numerics == ON_POLICY and idle.setting.endswith("lm_head")
        has_adapters = adapters and idle.setting.endswith("sync_dir")  # SGLang's, as files
        if not follows_model and not has_adapters:
            yield idle


def _replay(replay: ReplayConfig, objective: ObjectiveConfig) -> Iterator[Idle]:
    if isinstance(replay, RolloutReplay) and replay.source == "reprefill":
        reason = "replay.source = reprefill records the routes of every sample"
        yield from _set_among(("missing",), replay, "replay.", reason)
    if isinstance(replay, R2) and objective.num_minibatches == 1:
        reason = "objective.num_minibatches = 1: the update has the weights of the scoring forward"
        yield Idle("replay.mode", replay.mode, reason)


def _replay_of_single_turns(
    replay: ReplayConfig, task: TaskConfig, engine: EngineConfig
) -> Iterator[Idle]:
    """Yield replay.duplicate_routes where an engine feeds every token once."""
    in_process = isinstance(engine, HFEngineConfig | VLLMEngineConfig)
    if in_process and isinstance(replay, RolloutReplay) and not isinstance(task, EpisodeTask):
        reason = f"task.kind = {task.kind}: an engine in this process feeds every token once"
        yield from _set_among(("duplicate_routes",), replay, "replay.", reason)


def _correction(correction: CorrectionConfig, objective: ObjectiveConfig) -> Iterator[Idle]:
    usual = correction.of_preset()
    if not correction.rejects:
        reason = "correction: no gate or weight bound rejects a slot whose ratio is finite"
        names = ("denominator", "protect")
        yield from _set_among(names, correction, "correction.", reason, usual)
    ungated = not correction.gates or correction.normalise == "batch"
    if correction.weight.level == "none" and ungated:
        reason = "correction.weight.level = none: all weights of slots with a finite ratio are 1"
        yield from _set_among(("normalise",), correction, "correction.", reason, usual)
    if correction.centering != "head":
        reason = f"correction.centering = {correction.centering}"
        yield from _set_among(("head_size",), correction, "correction.", reason, usual)
    terms = {
        "kl": objective.kl.in_loss,
        "entropy": objective.entropy_coef > 0,
        "value": objective.has_critic,
    }
    missing = [term for term in LOSS_TERMS if term not in correction.protect and not terms[term]]
    if missing:
        reason = f"the objective has no term {' or '.join(missing)} to leave out"
        yield from _set_among(("protect",), correction, "correction.", reason, usual)


def _correction_on_policy(run: RunConfig) -> Iterator[Idle]:
    """Yield a correction of the ratio old / rollout, which is exactly 1 on-policy."""
    correction = run.correction
    if run.numerics != ON_POLICY:
        return
    reason = "numerics = on-policy: old / rollout is exactly 1"
    weighted = correction.ratio == "old/rollout" and correction.weight.level != "none"
    gates = [
        gate.label
        for gate in correction.gates
        if (gate.ratio or correction.ratio) == "old/rollout" and gate.statistic != "trainer_prob"
    ]
    if correction.preset is not None and (weighted or gates):
        yield Idle("correction.preset", correction.preset, reason)
        return
    if weighted:
        yield Idle("correction.weight.level", correction.weight.level, reason)
    if gates:
        yield Idle("correction.gates", ", ".join(gates), reason)


def _advantages(objective: ObjectiveConfig) -> Iterator[Idle]:
    usual, baseline = objective.of_preset(), f"objective.baseline = {objective.baseline}"
    if not objective.has_critic:
        yield from _set_among(("lam",), objective, "objective.", baseline, usual)
        if objective.critic is not None:
            names = tuple(type(objective.critic).model_fields)
            yield from _set_among(names, objective.critic, "objective.critic.", baseline)
    if objective.baseline in GROUP_BASELINES:
        reason = f"{baseline} compares whole responses"
        yield from _set_among(("gamma",), objective, "objective.", reason, usual)
    if objective.reduction != "sequence-mean-token-constant":
        reason = f"objective.reduction = {objective.reduction}"
        yield from _set_among(("reduction_length",), objective, "objective.", reason, usual)
    if not objective.overlong_buffer:
        reason = "objective.overlong_buffer = 0"
        yield from _set_among(("overlong_penalty",), objective, "objective.", reason, usual)


def _surrogate(objective: ObjectiveConfig) -> Iterator[Idle]:
    name, usual = objective.surrogate, objective.of_preset()
    reason = f"objective.surrogate = {name}"
    names: list[str] = []
    if name not in CLIPPING_SURROGATES:
        names += ["clip_low", "clip_high"]
    if name != "ppo":
        names.append("dual_clip")
    if name != "sapo":
        names += ["tau_positive", "tau_negative"]
    if name in ("pg", "gmpo"):
        names.append("ratio_level")
    yield from _set_among(tuple(names), objective, "objective.", reason, usual)
    if name in ("cispo", "topr") and objective.ratio_level == "sequence-token":
        reason = f"{reason} takes the ratio without gradient, as with sequence"
        yield from _set_among(("ratio_level",), objective, "objective.", reason, usual)


def _kl(kl: KLConfig) -> Iterator[Idle]:
    if not kl.coef:
        names = ("where", "estimator", "importance", "reference")
        yield from _set_among(names, kl, "objective.kl.", "objective.kl.coef = 0")


def _single_update(run: RunConfig) -> Iterator[Idle]:
    """Yield bounds on how far a policy or value has moved, if a batch has a single update.

    All of the batch is then evaluated with the weights it was scored with: new / old is 1, and the
    critic's new value is its old one. On-policy, new / rollout is 1 as well.
    """
    objective, usual = run.objective, run.objective.of_preset()
    if objective.num_minibatches > 1:
        return
    reason = "objective.num_minibatches = 1: the only update of a batch has"
    if run.numerics == ON_POLICY:
        why = f"{reason} ratio 1"
        yield from _set_among(RATIO_BOUNDS, objective, "objective.", why, usual)
    elif run.scores_old:
        why = f"{reason} new / old = 1 (correction.preset = ppo-is bounds new / rollout)"
        yield from _set_among(RATIO_BOUNDS, objective, "objective.", why, usual)
    if objective.critic is not None:
        why = f"{reason} the values of scoring"
        yield from _set_among(("clip",), objective.critic, "objective.critic.", why)


def _train(train: TrainConfig, correction: CorrectionConfig) -> Iterator[Idle]:
    if not train.ranks:
        yield from _set_among(("rank_timeout",), train, "train.", "train.ranks = 0")
    if correction.ratio == "new/rollout":
        reason = f"correction {correction.name} has no scoring forward"
        yield from _set_among(("reuse_scoring_forward",), train, "train.", reason)


def _logits_on_policy(run: RunConfig) -> Iterator[Idle]:
    if run.numerics == ON_POLICY:
        reason = "numerics = on-policy makes the logits of a micro-batch at once"
        yield from _set_among(("logits_chunk",), run.train, "train.", reason)


def _cluster(cluster: ClusterConfig) -> Iterator[Idle]:
    if isinstance(cluster, RayCluster) and cluster.address is None:
        reason = "cluster.address is unset: the Ray that is started has a token"
        yield from _set_among(("auth",), cluster, "cluster.", reason)


def _evaluation(evaluation: EvalConfig, rollout: RolloutConfig) -> Iterator[Idle]:
    if not evaluation.k:
        names = ("temperature", "top_p", "top_k")
        yield from _set_among(names, evaluation, "eval.", "eval.k = 0 samples nothing")
    if rollout.quant is None:
        yield from _set_among(("quantised",), evaluation, "eval.", "rollout.quant is unset")


def _pressure(rollout: RolloutConfig) -> Iterator[Idle]:
    pressure = rollout.pressure
    if pressure is not None and not pressure.scale:
        reason = "the engine's routers choose as without rollout.pressure"
        yield Idle("rollout.pressure.scale", pressure.scale, reason)
