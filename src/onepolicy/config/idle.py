"""Settings that change nothing beside the others. They never stop a run, so that sweeps work.

A value that is a default or comes from a preset is never reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onepolicy.config.base import Frozen
from onepolicy.config.cluster import RayCluster
from onepolicy.config.correction import LOSS_TERMS, STATISTICS, CorrectionConfig
from onepolicy.config.engine import ServerEngineConfig, SGLangConfig
from onepolicy.config.objective import CriticConfig
from onepolicy.config.option_rules import native_adapter, on_policy, reprefills
from onepolicy.config.replay import R2, RolloutReplay
from onepolicy.config.rules import Rule, unused, value_at, written
from onepolicy.config.run import RunConfig
from onepolicy.config.surrogates import BOUNDS
from onepolicy.config.task import EpisodeTask


class Idle(NamedTuple):
    """A setting that changes nothing, and why."""

    setting: str  # dotted path
    value: object
    reason: str  # the setting beside it


def idle_settings(config: Frozen) -> list[Idle]:
    """Return the settings that change nothing, each once, in the order of the rows."""
    rules: tuple[Rule[Any], ...] = config.rules
    if isinstance(config, RunConfig):
        rules = IDLE
    found: dict[str, Idle] = {}
    for rule in rules:
        if rule.kind == "idle" and rule.setting not in found and rule.when(config):
            value = value_at(config, rule.setting)
            found[rule.setting] = Idle(rule.setting, value, rule.reason(config))
    return list(found.values())


def describe_idle(settings: list[Idle]) -> str:
    """Return one line that names the idle settings: `no effect here: A = 1 (why); B = 2 (why)`."""
    listed = (f"{each.setting} = {written(each.value)} ({each.reason})" for each in settings)
    return f"no effect here: {'; '.join(listed)}"


def _float32_throughout(run: RunConfig) -> bool:
    """Return whether the trainer computes in float32, also on a GPU, which has its own default."""
    shards_too = run.train.autocast == "off" and run.train.fsdp_param_dtype == "same"
    stays = run.names_precision or run.train.device == "cpu"
    return run.model.dtype == "float32" and shards_too and stays


def _missing_terms(run: RunConfig) -> list[str]:
    """Return the terms of the loss that do not see rejected slots, and that there are not."""
    there = {
        "kl": run.objective.kl.in_loss,
        "entropy": run.objective.entropy_coef > 0,
        "value": run.objective.has_critic,
    }
    return [each for each in LOSS_TERMS if each not in run.correction.protect and not there[each]]


def _weights_are_1(run: RunConfig) -> bool:
    """Return whether the weight of every slot with a finite ratio is 1, normalised or not."""
    correction = run.correction
    ungated = not correction.gates or correction.normalise == "batch"
    return correction.weight.level == "none" and ungated


def _weighs_old(correction: CorrectionConfig) -> bool:
    return not correction.bypass and correction.weight.level != "none"


def _gates_on_old(correction: CorrectionConfig) -> list[str]:
    """Return the gates that pass every slot where old / rollout is 1."""
    return [
        gate.label
        for gate in correction.gates
        if not correction.needs_current_policy(gate)
        and STATISTICS[gate.statistic].limits.agree is not None
    ]


def _preset_on_old(run: RunConfig) -> bool:
    """Return whether a preset corrects the ratio old / rollout, which is 1 on-policy."""
    correction = run.correction
    corrects = _weighs_old(correction) or bool(_gates_on_old(correction))
    return run.rollout_is_old and correction.preset is not None and corrects


def _one_update(run: RunConfig) -> bool:
    """Return whether a batch has one update, with the weights that it was scored with."""
    return run.objective.num_minibatches == 1


def _unread(setting: str) -> tuple[Rule[RunConfig], ...]:
    """Return the row of a bound where the surrogate does not read it."""
    return unused(
        f"objective.{setting}",
        lambda run: setting not in run.objective.loss.reads,
        "objective.surrogate = {objective.surrogate}",
    )


EXACT = "numerics = on-policy: old / rollout is exactly 1"
OF_CRITIC = " ".join(f"objective.critic.{name}" for name in CriticConfig.model_fields)
RATIO_BOUNDS = " ".join(f"objective.{name}" for name in BOUNDS)
ONE_UPDATE = "objective.num_minibatches = 1: the only update of a batch has"
IDLE: tuple[Rule[RunConfig], ...] = (
    *unused(
        "model.lm_head",
        _float32_throughout,
        "model.dtype = float32, train.autocast = off",
    ),
    *unused(
        "rollout.engine.lm_head",
        lambda run: (
            run.rollout.engine.lm_head == run.rollout.engine.dtype == "float32"
            and not on_policy(run)
        ),
        "rollout.engine.dtype = float32",
    ),
    *unused(
        "rollout.engine.sync_dir",
        lambda run: (
            isinstance(run.rollout.engine, ServerEngineConfig)
            and run.rollout.engine.sync != "disk"
            and not (isinstance(run.rollout.engine, SGLangConfig) and native_adapter(run))
        ),
        "rollout.engine.sync = {rollout.engine.sync}",
    ),
    *unused(
        "rollout.engine.bucket_mib",
        lambda run: (
            isinstance(run.rollout.engine, ServerEngineConfig) and run.rollout.engine.sync == "disk"
        ),
        "rollout.engine.sync = disk",
    ),
    *unused(
        "rollout.sampling.missing_support",
        lambda run: not run.rollout.sampling.narrows,
        "rollout.sampling.top_p, top_k and min_p cut nothing",
    ),
    *unused(
        "replay.missing",
        lambda run: reprefills(run),
        "replay.source = reprefill records the routes of every sample",
    ),
    Rule(
        "replay.mode",
        lambda run: isinstance(run.replay, R2) and _one_update(run),
        "objective.num_minibatches = 1: the update has the weights of the scoring forward",
        kind="idle",
    ),
    *unused(
        "replay.duplicate_routes",
        lambda run: (
            isinstance(run.replay, RolloutReplay)
            and run.rollout.engine.can.in_process
            and not isinstance(run.task, EpisodeTask)
        ),
        "task.kind = {task.kind}: an engine in this process feeds every token once",
    ),
    *unused(
        "correction.denominator correction.protect",
        lambda run: not run.correction.rejects,
        "correction: no gate or weight bound rejects a slot whose ratio is finite",
    ),
    *unused(
        "correction.normalise",
        _weights_are_1,
        "correction.weight.level = none: all weights of slots with a finite ratio are 1",
    ),
    *unused(
        "correction.head_size",
        lambda run: run.correction.centering != "head",
        "correction.centering = {correction.centering}",
    ),
    *unused(
        "correction.protect",
        lambda run: bool(_missing_terms(run)),
        lambda run: f"the objective has no term {' or '.join(_missing_terms(run))} to leave out",
    ),
    Rule("correction.preset", _preset_on_old, EXACT, kind="idle"),
    Rule(
        "correction.weight.level",
        lambda run: run.rollout_is_old and not _preset_on_old(run) and _weighs_old(run.correction),
        EXACT,
        kind="idle",
    ),
    Rule(
        "correction.gates",
        lambda run: (
            run.rollout_is_old and not _preset_on_old(run) and bool(_gates_on_old(run.correction))
        ),
        lambda run: f"{EXACT}, which passes {', '.join(_gates_on_old(run.correction))}",
        kind="idle",
    ),
    *unused(
        f"objective.lam {OF_CRITIC}",
        lambda run: not run.objective.has_critic,
        "objective.baseline = {objective.baseline}",
    ),
    *unused(
        "objective.gamma",
        lambda run: run.objective.compares_groups,
        "objective.baseline = {objective.baseline} compares whole responses",
    ),
    *unused(
        "objective.reduction_length",
        lambda run: run.objective.reduction != "sequence-mean-token-constant",
        "objective.reduction = {objective.reduction}",
    ),
    *unused(
        "objective.overlong_penalty",
        lambda run: not run.objective.overlong_buffer,
        "objective.overlong_buffer = 0",
    ),
    *(rule for name in BOUNDS for rule in _unread(name)),
    *unused(
        "objective.ratio_level",
        lambda run: not run.objective.loss.levels,
        "objective.surrogate = {objective.surrogate}",
    ),
    *unused(
        "objective.ratio_level",
        lambda run: run.objective.loss.detached and run.objective.ratio_level == "sequence-token",
        "objective.surrogate = {objective.surrogate} takes the ratio without gradient, as with "
        "sequence",
    ),
    *unused(
        "objective.kl.where objective.kl.estimator objective.kl.importance objective.kl.reference",
        lambda run: not run.objective.kl.coef,
        "objective.kl.coef = 0",
    ),
    *unused(
        RATIO_BOUNDS,
        lambda run: _one_update(run) and run.rollout_is_old,
        f"{ONE_UPDATE} ratio 1",
    ),
    *unused(
        RATIO_BOUNDS,
        lambda run: _one_update(run) and not run.correction.bypass,
        f"{ONE_UPDATE} new / old = 1 (correction.preset = ppo-is bounds new / rollout)",
    ),
    *unused("objective.critic.clip", _one_update, f"{ONE_UPDATE} the values of scoring"),
    *unused("train.rank_timeout", lambda run: not run.train.ranks, "train.ranks = 0"),
    *unused(
        "train.reuse_scoring_forward",
        lambda run: run.correction.bypass,
        "correction {correction.name} has no scoring forward",
    ),
    *unused(
        "train.reuse_scoring_forward",
        lambda run: run.rollout_is_old and run.scores_old and not run.scores_first,
        "numerics = on-policy has no scoring forward",
    ),
    *unused(
        "train.logits_chunk",
        lambda run: on_policy(run),
        "numerics = on-policy makes the logits of a micro-batch at once",
    ),
    *unused(
        "cluster.auth",
        lambda run: isinstance(run.cluster, RayCluster) and run.cluster.address is None,
        "cluster.address is unset: the Ray that is started has a token",
    ),
    *unused(
        "eval.temperature eval.top_p eval.top_k eval.min_p",
        lambda run: not run.eval.k,
        "eval.k = 0 samples nothing",
    ),
    *unused("eval.quantised", lambda run: run.rollout.quant is None, "rollout.quant is unset"),
    Rule(
        "rollout.pressure.scale",
        lambda run: run.rollout.pressure is not None and not run.rollout.pressure.scale,
        "the engine's routers choose as without rollout.pressure",
        kind="idle",
    ),
)
