"""Optional parts of a step. Each hook is a small object that the run's settings ask for."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from onepolicy.build.components import Components
from onepolicy.config import RolloutReplay, RunConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.interfaces import Scorer
from onepolicy.invariant.require_equal import differing_slots, require_equal
from onepolicy.run.step import Hook, StepResult, StepTimer
from onepolicy.run.step_metrics import compare_sides, metrics_per_layer, mismatch_metrics
from onepolicy.train.learner import LocalLearner
from onepolicy.train.own_weights import OwnWeights
from onepolicy.types import Group, TokenBatch

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
    """The check of on-policy runs (numerics): they stop if any bit of a log-probability differs.

    They stop before the optimiser moves: scores of the update itself are checked inside of it.
    """

    def __init__(self, learner: LocalLearner) -> None:
        self._learner = learner

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        require = partial(
            require_equal,
            groups=result.groups,
            fingerprint=self._learner.fingerprint,
            when=f"step {step + 1}",
        )
        require(result.batch)
        self._learner.scoring.require = require


class RequireEqualByVersion(Hook):
    """The check of on-policy runs whose tokens may be of older weights (rollout.max_staleness).

    Each token is scored under the weights that sampled it. A run stops before its optimiser moves
    if any bit differs.
    """

    def __init__(self, learner: LocalLearner, most: int) -> None:
        """Begin a run. most: rollout.max_staleness."""
        self._learner = learner
        self._own = OwnWeights(learner.scorer, most)

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        with timer("own_weights"):
            result.own = self._own.score(result.batch)
        require_equal(
            result.own,
            result.groups,
            self._learner.fingerprint,
            when=f"step {step + 1}, each token under the weights that sampled it",
        )
        result.metrics["staleness/differing"] = float(differing_slots(result.own).sum())
        self._own.keep()


class Counterfactual(Hook):
    """A scoring of the batch without replay, and its repetition (log.counterfactual_every)."""

    def __init__(self, config: RunConfig, scorer: Scorer) -> None:
        self._config, self._scorer = config, scorer
        self._scored = config.scores_first  # before the update

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        if not is_counterfactual_step(self._config, step):
            return
        with timer("counterfactual"):
            scored = result.batch
            if not self._scored:
                scored = self._scorer.score(result.batch)
            without_replay = self._scorer.score(result.batch, replay=False)
            result.metrics |= counterfactual_metrics(without_replay)
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
        assert isinstance(learner, LocalLearner), "a rule refuses ranks"
        if config.rollout.max_staleness:
            hooks.append(RequireEqualByVersion(learner, config.rollout.max_staleness))
        else:
            hooks.append(RequireEqual(learner))
    if isinstance(config.replay, RolloutReplay) and config.log.counterfactual_every:
        hooks.append(Counterfactual(config, learner.scorer))
    return hooks


def repeat_metrics(
    scorer: Scorer, batch: TokenBatch, without_replay: TokenBatch
) -> dict[str, float]:
    """Return the trainer's mismatch with itself (R3 paper, section 3.3).

    The same samples are scored a second time with the same weights, packed in the opposite order.
    repeat/... is with replay, counterfactual/repeat/... without. `batch` and `without_replay` are
    scored already. This runs two more scoring forwards.
    """
    order = list(range(batch.num_samples))[::-1]
    reversed_batch = batch.select(order)
    again = scorer.score(reversed_batch).select(order)
    again_without_replay = scorer.score(reversed_batch, replay=False).select(order)
    counterfactual = compare_scorings(without_replay, again_without_replay)
    return compare_scorings(batch, again) | _prefixed(counterfactual)


def compare_scorings(first: TokenBatch, second: TokenBatch) -> dict[str, float]:
    """Return k3, max |log ratio| and differing routers of two scorings of the same slots."""
    assert first.logp_old is not None
    assert second.logp_old is not None
    found = compare_sides(first, second.logp_old, first.logp_old)
    metrics = {"repeat/k3": found.k3, "repeat/max_dlogp": found.max_dlogp}
    if first.routing_native is not None and second.routing_native is not None:
        disagreement = routing_disagreement(first.routing_native, second.routing_native)
        metrics["repeat/routers"] = disagreement.routers
    return metrics


def counterfactual_metrics(without_replay: TokenBatch) -> dict[str, float]:
    """Return counterfactual/..., the metrics of the batch scored without replay."""
    metrics = mismatch_metrics(without_replay)
    of_scoring = {name: value for name, value in metrics.items() if not name.startswith("train/")}
    return _prefixed(of_scoring) | _prefixed(metrics_per_layer(without_replay))


def _prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"counterfactual/{name}": value for name, value in metrics.items()}
