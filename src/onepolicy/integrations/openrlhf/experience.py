"""Measures, fixed corrections and dumps where OpenRLHF has the whole step: on its driver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onepolicy.correct.weights import Average
from onepolicy.integrations.core.dump import dump_row, write_rows
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.sampling import check_sampling, settings_of
from onepolicy.integrations.core.settings import Settings, read_settings
from onepolicy.integrations.core.step import measure_and_correct, padded

SETTINGS = "ONEPOLICY"
"""Environment variable with the settings, JSON as of `core.settings`."""
LEVEL = "--algo.advantage.is_correction_level"


def own_settings() -> Settings:
    """Return the settings of this process's environment."""
    return read_settings(os.environ.get(SETTINGS), f"environment variable {SETTINGS}")


def extend(module: Any) -> None:
    """Extend RemoteExperienceMaker, which scores the samples and computes their advantages."""
    maker = module.RemoteExperienceMaker
    theirs = maker.compute_advantages_and_returns

    def compute_advantages_and_returns(self: Any, experiences: list[Any]) -> list[Any]:
        settings = own_settings()
        report = check_step(self.args, settings, experiences)
        report.finish()
        made: list[Any] = theirs(self, experiences)
        self.onepolicy_steps = getattr(self, "onepolicy_steps", 0) + 1
        if not hasattr(self, "onepolicy_first_step"):
            self.onepolicy_first_step = FirstStep("openrlhf")
            report.log_notes()
        average: Average = "slots"
        if self.args.actor.policy_loss_type == "gspo":
            average = "sequences"  # OpenRLHF then leaves its mean over tokens
        place = self.onepolicy_steps, self.onepolicy_first_step
        finish_step(made, settings, *place, average=average)
        return made

    maker.compute_advantages_and_returns = compute_advantages_and_returns


def extend_trainer(module: Any) -> None:
    """Extend BasePPOTrainer: its experience maker counts on from the steps of a resumed run."""
    theirs = module.BasePPOTrainer.train_step

    def train_step(self: Any, rollout_samples: Any, global_step: int) -> Any:
        self.experience_maker.onepolicy_steps = global_step
        return theirs(self, rollout_samples, global_step)

    module.BasePPOTrainer.train_step = train_step


def finish_step(
    experiences: Sequence[Any],
    settings: Settings,
    step: int,
    first: FirstStep,
    *,
    average: Average,
) -> None:
    """Measure, correct and dump the experiences of a step, in place. average: of the loss.

    The advantages get the correction's weights. Every sample's `info` gets the step's metrics,
    which OpenRLHF averages and logs.
    """
    old, rollout, mask, advantages = (
        _together(experiences, name)
        for name in ("action_log_probs", "rollout_log_probs", "action_mask", "advantages")
    )
    if settings.dump is not None:
        rows = [row for experience in experiences for row in _rows(experience, step)]
        write_rows(settings.dump, step, rows, framework="openrlhf")
    first.look(old.float(), rollout.float(), mask.bool())
    sides = old.float(), rollout.float(), mask.bool()
    found = measure_and_correct(advantages, *sides, settings.correction, average)
    start = 0
    for experience in experiences:
        samples, actions = experience.advantages.shape
        if settings.correction is not None:
            part = found.advantages[start : start + samples, :actions]
            experience.advantages = part.to(experience.advantages)
        for name, value in found.metrics.items():
            experience.info[name] = torch.full((samples,), value)
        start += samples


def check_step(args: Any, settings: Settings, experiences: Sequence[Any]) -> Preflight:
    """Return the report of a step's settings."""
    report = Preflight("OpenRLHF")
    level = args.algo.advantage.is_correction_level
    sampled = settings_of(getattr(args, "rollout", None), "--rollout.{name} {}")
    check_sampling(report, sampled, settings.correction)
    report.require(
        "the rollout's log-probabilities",
        all(experience.rollout_log_probs is not None for experience in experiences),
        found=f"{LEVEL} {level}",
        fix=f"OpenRLHF asks vLLM for them with {LEVEL} token only; a correction of ours then takes "
        "the place of its own",
    )
    correction = settings.correction
    if correction is None:
        if level != "off":
            report.note(
                f"OpenRLHF's own correction is on ({LEVEL} {level}); "
                '{"correction": "off"} in ' + SETTINGS + " measures alone"
            )
        return report
    report.require(
        "sampler's log-probabilities for score centering",
        correction.centering == "none",
        found=f"centering={correction.centering}",
        fix="OpenRLHF carries no likeliest tokens of the sampler; choose another correction",
    )
    loss = args.actor.policy_loss_type
    report.require(
        f"the loss of {correction.name}",
        loss == "ppo" or not correction.live,
        found=f"--actor.policy_loss_type {loss}",
        fix="its ratio is of a whole sequence; use ppo",
    )
    report.note(f"{correction.name} replaces OpenRLHF's own correction ({LEVEL} {level})")
    return report


def _together(experiences: Sequence[Any], name: str) -> Tensor:
    return padded([row for experience in experiences for row in getattr(experience, name)])


def _rows(experience: Any, step: int) -> list[dict[str, Any]]:
    """Return the rows of a dump. Entry t of a response's columns predicts token t + 1."""
    rows = []
    for i, mask in enumerate(experience.action_mask.bool()):
        sampled = mask.nonzero()[:, 0]
        if not len(sampled):
            continue
        part = slice(int(sampled[0]), int(sampled[-1]) + 1)
        rows.append(
            dump_row(
                experience.sequences[i, 1:][part],
                mask[part],
                experience.rollout_log_probs[i, part].float(),
                experience.action_log_probs[i, part].float(),
                step=step,
                reward=float(experience.rewards[i]),
            )
        )
    return rows
