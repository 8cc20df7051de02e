"""Checks of a verl configuration before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.sampling import Sampled, check_sampling, settings_of
from onepolicy.integrations.verl import VENDOR, VENDOR_VARIABLE
from onepolicy.integrations.verl.settings import Settings
from onepolicy.integrations.verl.workers import WorkerReport

FSDP = ("fsdp", "fsdp2")
SECTION = "algorithm.rollout_correction"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def check_config(config: Any, settings: Settings, environment: Mapping[str, str]) -> Preflight:
    """Return the report of what the configuration alone shows."""
    report = Preflight("verl")
    rollout = config.actor_rollout_ref.rollout
    report.require(
        "the rollout's log-probabilities",
        bool(rollout.calculate_log_probs),
        found=f"actor_rollout_ref.rollout.calculate_log_probs={rollout.calculate_log_probs}",
        fix="set it to true; without them there is nothing to measure or correct",
    )
    _check_replay(report, config, environment)
    _check_correction(report, config, settings)
    if settings.dump is not None:
        report.require(
            "something to dump",
            not _bypasses(config),
            found=f"{SECTION}.bypass_mode={_bypasses(config)}",
            fix="bypass mode scores no batch, so a dump has no trainer side; leave one out",
        )
    check_sampling(
        report,
        _sampling_of(rollout),
        settings.correction,
        no_supports="verl's batch has no field for the tokens that they leave",
        leave_out="trainer.onepolicy.correction",
    )
    return report


def _sampling_of(rollout: Any) -> Iterator[Sampled]:
    """Yield the settings of the rollout. verl scores at the rollout's temperature."""
    for one in settings_of(rollout, "actor_rollout_ref.rollout.{name}={}"):
        if one.name != "logprobs_mode" or rollout.get("temperature", 1.0) != 1.0:
            yield one


def replays(config: Any) -> bool:
    """Return whether onepolicy's engine replays in this run."""
    asked = bool(config.actor_rollout_ref.rollout.enable_rollout_routing_replay)
    return asked and config.actor_rollout_ref.actor.strategy in FSDP


def check_workers(report: Preflight, answers: Sequence[WorkerReport], *, routes: bool) -> None:
    """Add what the workers found to the report."""
    if not routes:
        return
    foreign = sorted({answer.engine for answer in answers if not answer.is_ours})
    report.require(
        "onepolicy's engine in the workers",
        not foreign,
        found=", ".join(foreign),
        fix=(
            f"the workers need {VENDOR_VARIABLE}={VENDOR} in their environment (on several nodes: "
            f"ray_kwargs.ray_init.runtime_env.env_vars.{VENDOR_VARIABLE}) and onepolicy installed; "
            "VERL_LOGGING_LEVEL=DEBUG shows why a plugin failed to load"
        ),
    )
    problems = sorted({answer.problem for answer in answers if answer.problem})
    report.require(
        "routers that can be replayed",
        not problems,
        found="; ".join(problems),
        fix="change the model's config, or set rollout.enable_rollout_routing_replay=false",
    )
    if not problems and not foreign:
        report.note(f"replayed: {answers[0].routers}")


def _check_replay(report: Preflight, config: Any, environment: Mapping[str, str]) -> None:
    rollout, strategy = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.strategy
    if not rollout.enable_rollout_routing_replay:
        report.note(
            "rollout.enable_rollout_routing_replay=false: nothing is replayed (right for a dense "
            "model)"
        )
        return
    if strategy not in FSDP:
        report.note(
            f"actor.strategy={strategy}: routes are replayed by verl's own engine, not onepolicy's"
        )
        return
    vendor = environment.get(VENDOR_VARIABLE)
    report.require(
        "the engine that replays",
        vendor == VENDOR,
        found=f"{VENDOR_VARIABLE}={vendor}",
        fix=f"export {VENDOR_VARIABLE}={VENDOR}; verl's own {strategy} engine ignores the routes",
    )


def _check_correction(report: Preflight, config: Any, settings: Settings) -> None:
    own, loss_mode = config.algorithm.get("rollout_correction"), _loss_mode(config)
    if settings.correction is None:
        report.require(
            "a correction for the loss",
            loss_mode != VENDOR,
            found=f"{LOSS_MODE}={loss_mode} without trainer.onepolicy.correction",
            fix="name one (ppo-is, pg-tis, ipo, ..), or choose another loss",
        )
        return
    correction = settings.correction
    report.require(
        f"correction {correction.name} alone",
        own is not None and own.get("rollout_is") is None and own.get("rollout_rs") is None,
        found=f"{SECTION}={_shown(own)}",
        fix=(
            "two corrections would weigh every token twice; leave verl's section there, with "
            "rollout_is=null and rollout_rs=null"
        ),
    )
    report.require(
        "sampler's log-probabilities for score centering",
        correction.centering == "none",
        found=f"centering={correction.centering}",
        fix="verl's batches carry no likeliest tokens of the sampler; choose another correction",
    )
    if settings.live is not None:
        _check_live(report, config, settings.live)
    else:
        _check_fixed(report, config, correction)


def _check_fixed(report: Preflight, config: Any, correction: CorrectionConfig) -> None:
    loss_mode = _loss_mode(config)
    report.require(
        f"a scored batch for {correction.name}",
        not _bypasses(config),
        found=f"{SECTION}.bypass_mode={_bypasses(config)}",
        fix="set it to false: its weights compare the trainer's score with the rollout's",
    )
    report.require(
        f"a loss that takes the weights of {correction.name}",
        loss_mode not in (VENDOR, "geo_mean", "bypass_mode"),
        found=f"{LOSS_MODE}={loss_mode}",
        fix=(
            "geo_mean (GMPO) averages over the sample before it multiplies, bypass_mode ignores "
            "the weights, and onepolicy is for corrections of the new policy; use vanilla, gspo, "
            "cispo, sapo, ..."
        ),
    )
    report.require(
        f"gates of {correction.name} that need no advantage",
        all(gate.when == "always" for gate in correction.gates),
        found=f"{len(correction.gates)} gates, when={[gate.when for gate in correction.gates]}",
        fix="verl computes advantages after the correction; leave `when` out",
    )


def _check_live(report: Preflight, config: Any, correction: CorrectionConfig) -> None:
    fixed, loss_mode = correction.fixed_part, _loss_mode(config)
    report.require(
        f"the loss of {correction.name}",
        loss_mode == VENDOR and _bypasses(config),
        found=f"{LOSS_MODE}={loss_mode}, {SECTION}.bypass_mode={_bypasses(config)}",
        fix=(
            f"it needs the policy that is being trained, in the loss: set {LOSS_MODE}={VENDOR} and "
            f"{SECTION}.bypass_mode=true"
        ),
    )
    report.require(
        f"{correction.name} against the rollout alone",
        fixed.weight.level == "none" and not fixed.gates,
        found=f"weight.level={fixed.weight.level} and {len(fixed.gates)} gates of old/rollout",
        fix="with bypass_mode there is no old policy; give one of the two",
    )


def _bypasses(config: Any) -> bool:
    own = config.algorithm.get("rollout_correction")
    return own is not None and bool(own.get("bypass_mode", False))


def _loss_mode(config: Any) -> str:
    mode: str = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    return mode


def _shown(section: Any) -> str:
    if section is None:
        return "null"
    return f"rollout_is={section.get('rollout_is')}, rollout_rs={section.get('rollout_rs')}"
