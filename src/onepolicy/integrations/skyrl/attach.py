"""`attach(trainer)`: measures, corrections and dumps where SkyRL's driver has the whole step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.console import print_text
from onepolicy.correct.weights import Average
from onepolicy.errors import describe_argument
from onepolicy.integrations.core.advantages import named_correction
from onepolicy.integrations.core.dump import dump_row, write_rows
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.sampling import Sampled, check_sampling, settings_of
from onepolicy.integrations.core.settings import Settings, dump_folder
from onepolicy.integrations.core.step import measure_and_correct
from onepolicy.integrations.core.supports import add_supports
from onepolicy.integrations.skyrl.loss import NAME, registered_correction
from onepolicy.support.checks import check_supports
from onepolicy.support.trace import SupportTrace

OWN = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
"""SkyRL's settings of algorithm.off_policy_correction; None is off."""
MARK = "onepolicy_attached"
"""Attribute of a trainer that `attach` was called for."""
SUPPORTS = "rollout_sample_support"
ANCHORED_AT_ROLLOUT = (
    "rollout_is",
    "dppo",
    "cross_entropy",
    "cispo with cispo.cispo_anchor=rollout",
)
"""Losses whose ratio is not new / old."""


def attach(
    trainer: Any,
    *,
    correction: str | CorrectionConfig | None = None,
    dump: Path | str | None = None,
) -> Preflight:
    """Attach onepolicy to a RayPPOTrainer, before `build_models`. The report goes to stderr.

    One method of the instance is wrapped, `compute_advantages_and_returns`. Its metrics go into the
    trainer's own.

    Args:
        trainer: of SkyRL 0.4, or its fully asynchronous one.
        correction: a preset's name or a configured one. One that needs the policy being trained
            goes with `register_loss` and policy_loss_type=onepolicy.
        dump: folder for `onepolicy audit`: one file per step.

    Returns:
        The report. `str()` gives it as text.

    Raises:
        UsageError: the trainer's settings do not go with these. Each is named, with its fix.
    """
    settings = Settings(correction=named_correction(correction), dump=dump_folder(dump, "attach"))
    report = check_settings(trainer.cfg, settings)
    report.require(
        "one attach",
        not getattr(trainer, MARK, False),
        found="a trainer that onepolicy is attached to",
        fix="it would correct every step twice; attach once, with everything",
    )
    report.finish()
    setattr(trainer, MARK, True)
    theirs = trainer.compute_advantages_and_returns

    def compute_advantages_and_returns(data: Any) -> Any:
        made = theirs(data)
        finish_step(trainer, made, settings)
        return made

    trainer.onepolicy_first_step = FirstStep("skyrl")
    trainer.compute_advantages_and_returns = compute_advantages_and_returns
    print_text(report, stderr=True)
    return report


def finish_step(trainer: Any, data: Any, settings: Settings) -> None:
    """Measure, correct and dump a TrainingInputBatch, in place.

    Raises UsageError if a side's log-probabilities are missing, and SupportError for a sampled
    token without its support, or outside of it: SkyRL would score it as 0, or over other tokens.
    """
    old, rollout = data.get("action_log_probs"), data.get("rollout_logprobs")
    if old is None or rollout is None:
        _require_nothing(settings, scored=old is not None)
        return
    old, rollout, mask = old.float(), rollout.float(), _mask(data)
    tokens = data["sequences"][:, -mask.shape[1] :]
    trainer.onepolicy_first_step.look(old, rollout, mask, tokens=tokens)
    supports = _supports(data, mask)
    if settings.dump is not None:
        rows = _rows(trainer, data, old, rollout, mask, supports)
        write_rows(settings.dump, trainer.global_step, rows, framework="skyrl")
    average: Average = "slots"
    if _reduction(trainer.cfg.trainer.algorithm) == "sequence_mean":
        average = "sequences"
    sides = old, rollout, mask
    found = measure_and_correct(data["advantages"], *sides, settings.correction, average)
    if settings.correction is not None:
        data["advantages"] = found.advantages
    trainer.all_metrics.update(found.metrics)


def check_settings(cfg: Any, settings: Settings) -> Preflight:
    """Return the report of SkyRL's configuration."""
    report = Preflight("SkyRL")
    algorithm, correction = cfg.trainer.algorithm, settings.correction
    loss = str(algorithm.policy_loss_type)
    check_sampling(
        report,
        _sampling_of(cfg),
        correction,
        scored_at=getattr(algorithm, "temperature", None),
        over_supports=_scores_over_supports(cfg),
        no_supports="SkyRL scores over what they leave with "
        "trainer.algorithm.enable_sample_support_replay=true and "
        "generator.inference_engine.enable_return_sample_support_set=true",
        leave_out="`correction`",
    )
    if correction is None:
        report.require(
            "a correction for the loss",
            loss != NAME,
            found=f"policy_loss_type={loss}",
            fix="attach with the correction that register_loss got",
        )
        return report
    own = [name for name in OWN if getattr(algorithm.off_policy_correction, name, None) is not None]
    report.require(
        f"correction {correction.name} alone",
        not own,
        found=f"off_policy_correction.{', '.join(own)}",
        fix="two corrections would weigh every token twice; leave SkyRL's out",
    )
    report.require(
        "sampler's log-probabilities for score centering",
        correction.centering == "none",
        found=f"centering={correction.centering}",
        fix="SkyRL carries no likeliest tokens of the sampler; choose another correction",
    )
    report.require(
        f"the loss of {correction.name}",
        (loss == NAME) == correction.live,
        found=f"policy_loss_type={loss}",
        fix=f"corrections of the new policy go with register_loss and policy_loss_type={NAME}, "
        "fixed ones with SkyRL's losses",
    )
    if loss == NAME and correction.live:
        registered = registered_correction()
        report.require(
            f"{correction.name} in the loss too",
            registered in (None, correction),
            found=f"register_loss got {getattr(registered, 'name', None)}",
            fix="attach applies one part and the loss the other; give both the same",
        )
    _check_reduction(report, algorithm, correction)
    return report


def _check_reduction(report: Preflight, algorithm: Any, correction: CorrectionConfig) -> None:
    """Require a loss that keeps the correction's weights as they are."""
    loss, reduction = str(algorithm.policy_loss_type), _reduction(algorithm)
    report.require(
        f"advantages that keep the weights of {correction.name}",
        not getattr(algorithm, "advantage_batch_normalize", False),
        found="advantage_batch_normalize=true",
        fix="SkyRL subtracts their mean after they are weighted; set it to false",
    )
    report.require(
        f"a loss in which weights of {correction.name} can average 1",
        not (correction.scales and reduction == "prompt_mean"),
        found=f"loss_reduction={reduction}",
        fix="it is a mean over prompts; use token_mean or sequence_mean",
    )
    anchor = loss
    if loss == "cispo":
        anchor = f"cispo with cispo.cispo_anchor={algorithm.cispo.cispo_anchor}"
    report.require(
        f"a ratio new / old beside {correction.name}",
        anchor not in ANCHORED_AT_ROLLOUT,
        found=f"policy_loss_type={anchor}",
        fix="this loss compares with the rollout itself; use regular, or leave `correction` out",
    )


def _reduction(algorithm: Any) -> str:
    return str(getattr(algorithm, "loss_reduction", "token_mean"))


def _scores_over_supports(cfg: Any) -> bool:
    """Return whether SkyRL's own scoring and loss are over the tokens that the engine returns."""
    engine = getattr(getattr(cfg, "generator", None), "inference_engine", None)
    returned = getattr(engine, "enable_return_sample_support_set", False)
    algorithm = cfg.trainer.algorithm
    return bool(returned and getattr(algorithm, "enable_sample_support_replay", False))


def _sampling_of(cfg: Any) -> Iterator[Sampled]:
    """Yield the settings of the engine's sampling parameters."""
    section = "generator.sampling_params"
    parameters = getattr(getattr(cfg, "generator", None), "sampling_params", None)
    yield from settings_of(parameters, f"{section}.{{name}}={{}}")
    more = getattr(parameters, "additional_kwargs", None)
    yield from settings_of(more, f"{section}.additional_kwargs.{{name}}={{}}")


def _require_nothing(settings: Settings, *, scored: bool) -> None:
    if settings.correction is None and settings.dump is None:
        return
    fix = "set generator.sampling_params.logprobs, so that the engine returns them"
    if not scored:
        fix = "this loss skips the scoring forward; choose a loss of the old policy"
    raise UsageError(
        "SkyRL: this step lacks one side's log-probabilities, which correction and dump need; "
        f"{fix}"
    )


def _mask(data: Any) -> Tensor:
    """Return [B, R] bool: the sampled tokens of the real samples."""
    mask: Tensor = data["loss_mask"] > 0
    mask = mask.clone()
    filler = int((data.metadata or {}).get("pad_size", 0))  # make the batch divide by the ranks
    mask[len(mask) - filler :] = False
    return mask


def _supports(data: Any, mask: Tensor) -> list[SupportTrace] | None:
    """Return each sample's supports [R], checked; None if the batch carries none.

    SkyRL's PackedTensor has a row [K] of ids, filled with -1, for every token of a response.
    """
    packed = data.get(SUPPORTS)
    if packed is None:
        return None
    if packed.values.dim() != 2 or len(packed.cu_seqlens) != len(mask) + 1:
        raise UsageError(
            f"SkyRL: {SUPPORTS} is {describe_argument(packed.values)} in "
            f"{len(packed.cu_seqlens) - 1} samples, expected rows [tokens, top_k] of {len(mask)}"
        )
    width = mask.shape[1]
    responses, found = data["sequences"][:, -width:], []
    bounds = itertools.pairwise(packed.cu_seqlens.tolist())
    for i, (start, stop) in enumerate(bounds):
        # The rows are those of the last tokens that the model is fed, wherever padding stands.
        fed = data["attention_mask"][i].nonzero()[:, 0]
        places = fed[len(fed) - (stop - start) :] - (data["sequences"].shape[1] - width)
        if len(places) != stop - start or (places < 0).any():
            raise UsageError(f"SkyRL: {SUPPORTS} has {stop - start} rows for sample {i}, too many")
        rows = packed.values.new_full((width, packed.values.shape[1]), -1)
        rows[places] = packed.values[start:stop]
        found.append(SupportTrace.from_padded(rows))
        check_supports(found[i], responses[i], mask[i], name=f"SkyRL: sample {i}")
    return found


def _rows(
    trainer: Any,
    data: Any,
    old: Tensor,
    rollout: Tensor,
    mask: Tensor,
    supports: list[SupportTrace] | None,
) -> list[Any]:
    responses = data["sequences"][:, -mask.shape[1] :]
    rows = []
    for i, sampled in enumerate(mask):
        where = sampled.nonzero()[:, 0]
        if len(where):
            part = slice(int(where[0]), int(where[-1]) + 1)
            tokens = responses[i, part]
            step = trainer.global_step
            rows.append(dump_row(tokens, sampled[part], rollout[i, part], old[i, part], step=step))
            if supports is not None:
                add_supports(rows[-1:], [supports[i].at(part)])
    return rows
