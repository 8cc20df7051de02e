"""Optional parts of a step. Each hook is a small object that the run's settings ask for."""

from __future__ import annotations

from onepolicy.build.components import Components
from onepolicy.config import RolloutReplay, RunConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.run.result import StepResult, StepTimer
from onepolicy.run.step_metrics import counterfactual_metrics, metrics_per_layer, repeat_metrics
from onepolicy.types import Group, TokenBatch


class Hook:
    """A set of calls in `train_on_rollouts`. Every method does nothing here."""

    def after_rollout(self, groups: list[Group]) -> list[Group]:
        """Return the groups to train on."""
        return groups

    def after_score(self, batch: TokenBatch, groups: list[Group], step: int) -> None: ...

    def before_update(self, result: StepResult, step: int) -> None:
        """Read `result.batch`, the batch of the update."""

    def after_update(self, result: StepResult, step: int) -> None:
        """Read `result.batch`, scored by the weights before the update."""


class RecordRoutes(Hook):
    """The re-prefill (replay.source): a copy of the model records the finished samples' routes."""

    def __init__(self, components: Components, timer: StepTimer) -> None:
        self._reprefill, self._timer = components.reprefill, timer

    def after_rollout(self, groups: list[Group]) -> list[Group]:
        assert self._reprefill is not None
        with self._timer("reprefill"):
            return self._reprefill.fill(groups)


class RequireEqual(Hook):
    """The check of on-policy runs (numerics): they stop if any bit of a log-probability differs."""

    def __init__(self, components: Components) -> None:
        self._fingerprint = components.learner.fingerprint

    def after_score(self, batch: TokenBatch, groups: list[Group], step: int) -> None:
        from onepolicy.invariant.require_equal import require_equal

        require_equal(batch, groups, self._fingerprint, when=f"step {step + 1}")

    def after_update(self, result: StepResult, step: int) -> None:
        self.after_score(result.batch, result.groups, step)


class Counterfactual(Hook):
    """A scoring of the batch without replay, and its repetition (log.counterfactual_every)."""

    def __init__(self, components: Components, timer: StepTimer) -> None:
        self._config, self._timer = components.config, timer
        self._scorer = components.learner.scorer
        self._scored: TokenBatch | None = None

    def before_update(self, result: StepResult, step: int) -> None:
        if not is_counterfactual_step(self._config, step):
            return
        with self._timer("counterfactual"):
            scored = result.batch
            if not self._config.scores_old:
                scored = self._scorer.score(result.batch)
            without_replay = self._scorer.score(result.batch, replay=False)
            result.metrics |= counterfactual_metrics(without_replay)
            result.metrics |= metrics_per_layer(scored)
            result.metrics |= repeat_metrics(self._scorer, scored, without_replay)
        self._scored, result.without_replay = scored, without_replay

    def after_update(self, result: StepResult, step: int) -> None:
        if self._scored is not None:
            result.batch = self._scored


def is_counterfactual_step(config: RunConfig, step: int) -> bool:
    """Return whether step `step` (from 0) is scored without replay too.

    These are every log.counterfactual_every-th step and the last.
    """
    every = config.log.counterfactual_every
    return every > 0 and (step % every == 0 or step + 1 == config.steps)


def build_hooks(components: Components, timer: StepTimer) -> list[Hook]:
    """Build the hooks of one step, in the order in which they are called."""
    config = components.config
    hooks: list[Hook] = []
    if components.reprefill is not None:
        hooks.append(RecordRoutes(components, timer))
    if config.numerics == ON_POLICY:
        hooks.append(RequireEqual(components))
    if isinstance(config.replay, RolloutReplay):
        hooks.append(Counterfactual(components, timer))
    return hooks
