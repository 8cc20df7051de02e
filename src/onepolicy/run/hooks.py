"""Optional parts of a step. Each hook is a small object that the run's settings ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onepolicy.build.components import Components
from onepolicy.config import RolloutReplay, RunConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.interfaces import Scorer
from onepolicy.invariant.require_equal import require_equal
from onepolicy.run.step import Hook, StepResult, StepTimer
from onepolicy.run.step_metrics import counterfactual_metrics, metrics_per_layer, repeat_metrics
from onepolicy.types import Group

if TYPE_CHECKING:
    from onepolicy.train.reprefill import Reprefill


class RecordRoutes(Hook):
    """The re-prefill (replay.source): a copy of the model records the finished samples' routes."""

    def __init__(self, reprefill: Reprefill) -> None:
        self._reprefill = reprefill

    def after_rollout(self, groups: list[Group], timer: StepTimer) -> list[Group]:
        with timer("reprefill"):
            return self._reprefill.fill(groups)


class RequireEqual(Hook):
    """The check of on-policy runs (numerics): they stop if any bit of a log-probability differs."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        self.after_update(result, step)

    def after_update(self, result: StepResult, step: int) -> None:
        when = f"step {step + 1}"
        require_equal(result.batch, result.groups, self._fingerprint, when=when)


class Counterfactual(Hook):
    """A scoring of the batch without replay, and its repetition (log.counterfactual_every)."""

    def __init__(self, config: RunConfig, scorer: Scorer) -> None:
        self._config, self._scorer = config, scorer

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        if not is_counterfactual_step(self._config, step):
            return
        with timer("counterfactual"):
            scored = result.batch
            if not self._config.scores_old:
                scored = self._scorer.score(result.batch)
            without_replay = self._scorer.score(result.batch, replay=False)
            result.metrics |= counterfactual_metrics(without_replay)
            result.metrics |= metrics_per_layer(scored)
            result.metrics |= repeat_metrics(self._scorer, scored, without_replay)
        result.with_replay, result.without_replay = scored, without_replay

    def after_update(self, result: StepResult, step: int) -> None:
        if result.with_replay is not None:
            result.batch = result.with_replay


def is_counterfactual_step(config: RunConfig, step: int) -> bool:
    """Return whether step `step` (from 0) is scored without replay too.

    These are every log.counterfactual_every-th step and the last.
    """
    every = config.log.counterfactual_every
    return every > 0 and (step % every == 0 or step + 1 == config.steps)


def build_hooks(components: Components) -> list[Hook]:
    """Build the hooks of a run's steps, in the order in which they are called."""
    config, learner = components.config, components.learner
    hooks: list[Hook] = []
    if components.reprefill is not None:
        hooks.append(RecordRoutes(components.reprefill))
    if config.numerics == ON_POLICY:
        hooks.append(RequireEqual(learner.fingerprint))
    if isinstance(config.replay, RolloutReplay) and config.log.counterfactual_every:
        hooks.append(Counterfactual(config, learner.scorer))
    return hooks
