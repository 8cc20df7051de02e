"""Checks of slime's and miles' arguments, at a hook's first call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.integrations.core.advantages import needs_whole_step
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.sampling import Sampled, check_sampling
from onepolicy.integrations.core.settings import Settings

MEASURE = "--get-mismatch-metrics --custom-tis-function-path onepolicy.integrations.slime.tis"


def check_step(args: Any, settings: Settings, data: Mapping[str, Any]) -> Preflight:
    """Return the report of a whole-step hook."""
    report = Preflight("slime")
    report.require(
        "the rollout's log-probabilities",
        bool(data.get("rollout_log_probs")),
        found="rollout_data has no rollout_log_probs",
        fix="let the rollout function return them; without them there is nothing to measure",
    )
    report.require(
        "the trainer's log-probabilities",
        bool(data.get("log_probs")),
        found="rollout_data has no log_probs",
        fix=f"with one update per rollout slime scores only if asked to: add {MEASURE}",
    )
    check_sampling(report, sampling_of(args, top_p_replayed=True), settings.correction)
    if settings.dump is not None and not data.get("entropy"):
        report.note(
            "the dump has no entropy, without which `onepolicy audit` sees no other temperature "
            "and recommends no correction; --use-rollout-entropy adds it"
        )
    if settings.correction is None:
        return report
    _check_correction(report, settings.correction)
    report.require(
        f"correction {settings.correction.name} alone",
        not args.use_tis,
        found="--use-tis",
        fix="two corrections would weigh every token twice; leave --use-tis out",
    )
    report.require(
        f"old log-probabilities of the trainer for {settings.correction.name}",
        not getattr(args, "use_rollout_logprobs", False),
        found="--use-rollout-logprobs",
        fix="PPO's ratio is then new / rollout, which weighs every token already; leave one out",
    )
    ranks = getattr(args, "data_parallel_size", 1)
    report.require(
        f"all samples of the step for {settings.correction.name}",
        ranks == 1 or not needs_whole_step(settings.correction),
        found=f"{ranks} data-parallel ranks",
        fix="it counts over the whole step and this hook has one rank's samples; choose another "
        "correction",
    )
    return report


def sampling_of(args: Any, *, top_p_replayed: bool) -> Iterator[Sampled]:
    """Yield the settings of the rollout. Both trainers score at the rollout's temperature.

    top_p_replayed: the trainer scores over the tokens that top-p kept, as slime does.
    """
    for name in ("top_p", "top_k", "min_p"):
        value = getattr(args, f"rollout_{name}", None)
        if name != "top_p" or not top_p_replayed:
            yield Sampled(name, value, f"--rollout-{name.replace('_', '-')} {{}}")


def check_tis(
    args: Any,
    settings: Settings,
    logps: Sequence[Tensor],
    masks: Sequence[Tensor],
    *,
    top_p_replayed: bool,
) -> Preflight:
    """Return the report of a TIS hook."""
    report = Preflight("slime or miles")
    report.require(
        "whole responses in the loss",
        all(logp.shape == mask.shape for logp, mask in zip(logps, masks, strict=True)),
        found="log-probabilities of other lengths than the masks",
        fix="with context parallelism a micro-batch holds slices; run with "
        "--context-parallel-size 1, or in slime with "
        "--rollout-data-postprocess-path onepolicy.integrations.slime.step",
    )
    applied = None
    if args.use_tis:
        applied = settings.correction
    check_sampling(report, sampling_of(args, top_p_replayed=top_p_replayed), applied)
    if settings.correction is None:
        report.require(
            "a correction for --use-tis",
            not args.use_tis,
            found="--use-tis without onepolicy.correction in --custom-config-path",
            fix="name one (tis, icepop, ...), or measure only: --get-mismatch-metrics",
        )
        return report
    if not args.use_tis:
        return report
    _check_correction(report, settings.correction)
    report.require(
        f"one micro-batch for {settings.correction.name}",
        not needs_whole_step(settings.correction),
        found="a hook in the loss",
        fix="it counts over the whole step; in slime use --rollout-data-postprocess-path "
        "onepolicy.integrations.slime.step, or choose another correction",
    )
    report.require(
        f"gates of {settings.correction.name} that need no advantage",
        all(gate.when == "always" for gate in settings.correction.gates),
        found="a gate for one sign of the advantage",
        fix="the hook is handed no advantages; leave `when` out",
    )
    return report


def check_lengths(
    old: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]
) -> None:
    """Raise UsageError unless both sides have a log-probability for every response token."""
    for number, rows in enumerate(zip(old, rollout, masks, strict=True)):
        lengths = [len(row) for row in rows]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"slime or miles: sample {number} of this rank has {lengths[0]} log-probabilities "
                f"of the trainer, {lengths[1]} of the rollout and a loss mask of {lengths[2]} "
                "tokens; a rollout function must return one for every token of the response, also "
                "for those of a tool (any number). If its status is aborted, leave the sample out"
            )


def _check_correction(report: Preflight, correction: CorrectionConfig) -> None:
    report.require(
        f"a correction without the new policy, not {correction.name}",
        not correction.live,
        found=f"{correction.name} needs the ratio of the policy that is being trained",
        fix="neither hook is handed it; choose a fixed one (tis, icepop, geo-rs, ...). ppo-is is "
        "--use-rollout-logprobs, opsm is --use-opsm",
    )
