"""What a run may have around the steps of `train_on_rollouts`: each is a small object, made where the settings ask for it."""

from __future__ import annotations

from onepolicy.build.components import Components
from onepolicy.config import RolloutReplay, RunConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.run.result import StepResult, StepTimer
from onepolicy.run.step_metrics import counterfactual_metrics, metrics_per_layer, repeat_metrics
from onepolicy.types import Group, TokenBatch


class Hook:
    """Every method does nothing here."""

    def after_rollout(self, groups: list[Group]) -> list[Group]:
        return groups

    def after_score(self, batch: TokenBatch, groups: list[Group], step: int) -> None: ...

    def before_update(self, result: StepResult, step: int) -> None:
        """result.batch is what the update gets."""

    def after_update(self, result: StepResult, step: int) -> None:
        """result.batch is scored by the weights of before the update."""


class FillRoutes(Hook):
    """replay.source = reprefill: a second copy of the model records the routes of the finished samples."""

    def __init__(self, parts: Components, timer: StepTimer) -> None:
        self._reprefill, self._timer = parts.reprefill, timer

    def after_rollout(self, groups: list[Group]) -> list[Group]:
        assert self._reprefill is not None
        with self._timer("reprefill"):
            return self._reprefill.fill(groups)


class RequireEqual(Hook):
    """numerics = on-policy: the run stops if any log-probability differs in any bit."""

    def __init__(self, parts: Components) -> None:
        self._fingerprint = parts.learner.fingerprint

    def after_score(self, batch: TokenBatch, groups: list[Group], step: int) -> None:
        from onepolicy.invariant.require_equal import require_equal

        require_equal(batch, groups, self._fingerprint, when=f"step {step + 1}")

    def after_update(self, result: StepResult, step: int) -> None:
        self.after_score(result.batch, result.groups, step)


class Counterfactual(Hook):
    """log.counterfactual_every: the same batch scored without replay, and both scorings once more."""

    def __init__(self, parts: Components, timer: StepTimer) -> None:
        self._config, self._scorer, self._timer = parts.config, parts.learner.scorer, timer
        self._scored: TokenBatch | None = None

    def before_update(self, result: StepResult, step: int) -> None:
        if not is_counterfactual_step(self._config, step):
            return
        with self._timer("counterfactual"):
            scored = result.batch if self._config.scores_old else self._scorer.score(result.batch)
            without = self._scorer.score(result.batch, replay=False)
            result.metrics |= (
                counterfactual_metrics(without)
                | metrics_per_layer(scored)
                | repeat_metrics(self._scorer, scored, without)
            )
        self._scored, result.without_replay = scored, without

    def after_update(self, result: StepResult, step: int) -> None:
        if self._scored is not None:
            result.batch = self._scored


def is_counterfactual_step(config: RunConfig, step: int) -> bool:
    """Whether step `step` (from 0) is probed: every so often, and the last."""
    every = config.log.counterfactual_every
    return every > 0 and (step % every == 0 or step + 1 == config.steps)


def build_hooks(parts: Components, timer: StepTimer) -> list[Hook]:
    """Those of one step, in order."""
    config = parts.config
    hooks: list[Hook] = []
    if parts.reprefill is not None:
        hooks.append(FillRoutes(parts, timer))
    if config.numerics == ON_POLICY:
        hooks.append(RequireEqual(parts))
    if isinstance(config.replay, RolloutReplay):
        hooks.append(Counterfactual(parts, timer))
    return hooks
