"""One RL step: the main path of the package. Read this file first.

    sample_rollouts     the engine plays the step's episodes           -> groups of samples
    train_on_rollouts   score, advantages, correction, one update      -> new weights, metrics
    push_and_check      the engine loads the new weights

`StepRunner.rl_step` runs the three one after the other. run/async_rollouts.py lets sampling and
training overlap. run/hooks.py has the optional parts of a step, each a `Hook`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from onepolicy.build.components import Components
from onepolicy.config import CorrectionConfig
from onepolicy.correct.slots import Fields
from onepolicy.correct.weights import Average, weigh
from onepolicy.interfaces import MetricsSource, RecoverableEngine, SleepingSampler
from onepolicy.objective.advantages import compute_advantages, compute_outcomes, has_signal
from onepolicy.rollout.collect import collect_rollouts
from onepolicy.run.adapter_check import check_adapter
from onepolicy.run.recovery import Recovering
from onepolicy.run.step_metrics import check_finite, gradient_metrics, mismatch_metrics
from onepolicy.sync.push import push_weights
from onepolicy.train.pack import pack
from onepolicy.types import Group, Sample, TokenBatch

T = TypeVar("T")


class StepRunner:
    """The runner of a run's steps: its objects, hooks and recovery, built once."""

    def __init__(self, components: Components, hooks: Sequence[Hook]) -> None:
        """Build the runner. hooks: of `hooks.build_hooks`."""
        self.components, self.hooks = components, hooks
        self._recovering: Recovering | None = None
        if isinstance(components.engine, RecoverableEngine):  # replicas recover by themselves
            self._recovering = Recovering(components)

    async def rl_step(self, step: int, *, advance: Callable[[], None] = lambda: None) -> StepResult:
        """Run step `step` (from 0): rollouts, one update, new weights in the engine.

        advance: called after every episode.
        """
        components, timer = self.components, StepTimer()
        with timer("rollout"):
            sample = partial(sample_rollouts, components, step, advance)
            rollouts = await self.with_recovery(sample)
        if isinstance(components.engine, SleepingSampler):
            components.engine.sleep()
        result = train_on_rollouts(components, self.hooks, step, rollouts, timer)
        with timer("sync"):
            result.metrics |= await self.with_recovery(partial(push_and_check, components))
        return add_timings(components, result, timer)

    async def with_recovery(
        self,
        work: Callable[[], Awaitable[T]],
        cancel_pending: Callable[[], Awaitable[None]] | None = None,
    ) -> T:
        """Return the result of `work`, which is repeated if the engine is lost and comes back.

        cancel_pending: ends other requests to the engine before it gets the weights again.
        """
        if self._recovering is None:
            return await work()
        return await self._recovering.run(work, cancel_pending)


async def sample_rollouts(
    components: Components, step: int, advance: Callable[[], None] = lambda: None
) -> Rollouts:
    """Play the episodes of step `step` with the weights that the engine has at the time."""
    config = components.config
    accept = None
    if config.objective.dynamic_sampling:
        accept = has_signal
    groups, metrics = await collect_rollouts(
        components.engine,
        components.environment,
        config.rollout,
        components.sampling,
        step=step,
        seed=config.seed,
        route_spec=components.route_spec,
        advance=advance,
        accept=accept,
        rounds=config.objective.dynamic_sampling,
    )
    return Rollouts(groups, metrics)


def train_on_rollouts(
    components: Components, hooks: Sequence[Hook], step: int, rollouts: Rollouts, timer: StepTimer
) -> StepResult:
    """Update the learner's weights with the rollouts of a step."""
    config, learner = components.config, components.learner

    # Rewards relative to the group's baseline; then one packed batch: Sample[N] -> TokenBatch[T].
    groups = rollouts.groups
    for hook in hooks:
        groups = hook.after_rollout(groups, timer)
    max_tokens = config.rollout.sampling.max_tokens
    groups = compute_outcomes(groups, config.objective, max_tokens=max_tokens)
    batch = pack(groups)

    # The trainer's log-probabilities, with the rollout's experts replayed; reference and critic.
    with timer("score"):
        batch = learner.score(batch)
    check_finite(batch, batch.logp_old)

    # Advantage, weight and rejection of every slot.
    batch = compute_advantages(batch, config.objective)
    batch, correction_metrics = apply_correction(
        batch, components.correction, config.objective.reduction
    )
    result = StepResult(groups, batch, metrics=rollouts.metrics | correction_metrics)
    for hook in hooks:
        hook.before_update(result, step, timer)

    # Forward with replay, loss, backward, optimiser.
    with timer("update"):
        metrics, scored = learner.step(batch)
    if scored is not None:  # the update itself scored it, before its optimiser
        result.batch = scored
    result.metrics |= metrics | mismatch_metrics(result.batch) | gradient_metrics(result.batch)
    result.metrics |= rollout_metrics(groups)
    for hook in hooks:
        hook.after_update(result, step)
    return result


def apply_correction(
    batch: TokenBatch, correction: CorrectionConfig, reduction: str
) -> tuple[TokenBatch, dict[str, float]]:
    """Set the weight and rejection of every slot. Return the batch and the correction's metrics.

    correction: the `fixed_part`; the part that needs the policy being trained is evaluated in the
    loss (train/update_parts.py). reduction: of the objective.
    """
    logp_old = batch.logp_old
    if logp_old is None:  # bypass: the correction has no part that needs it
        logp_old = batch.logp_rollout
    average: Average = "slots"
    if reduction == "sequence-mean-token-mean":
        average = "sequences"
    fields = Fields(
        logp_old, batch.logp_rollout, batch.trainable, batch.segment, batch.turn, batch.advantage
    )
    weight, keep, metrics = weigh(correction, fields, average=average)
    return batch.replace(weight=weight, keep=keep), metrics


async def push_and_check(components: Components) -> dict[str, float]:
    """Push the learner's weights. Return their size, and the check of a LoRA adapter."""
    given = await push_weights(components.learner, *components.samplers)
    metrics = {"sync/gib": given / 2**30}
    if components.config.train.lora is None:
        return metrics
    return metrics | await check_adapter(components)


def add_timings(components: Components, result: StepResult, timer: StepTimer) -> StepResult:
    """Add the metrics that are known at the end of the step: times, and those of the engine."""
    times = timer.metrics()
    slots = sum(len(sample.tokens) - 1 for group in result.groups for sample in group.samples)
    result.metrics |= times | {"train/tokens_per_second": slots / times["time/step"]}
    if isinstance(components.engine, MetricsSource):
        result.metrics = components.engine.take_metrics() | result.metrics
    return result


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Return the metrics of the step's episodes, most of them means over episodes."""
    samples = [sample for group in groups for sample in group.samples]
    ends = [sample for group in groups for sample in _last_samples(group)]
    episodes = len(ends)
    rewards = [sample.reward for sample in ends]
    metrics = {
        "train/reward": sum(rewards) / episodes,
        "train/response_length": sum(s.response_length for s in samples) / episodes,
        "train/cut_by_length": sum(s.finish == "length" for s in ends) / episodes,
        "train/reward_min": min(rewards),
        "train/reward_max": max(rewards),
        "train/groups_without_signal": sum(not has_signal(group) for group in groups) / len(groups),
    }
    events = Counter(event for sample in ends for event in sample.events)
    turns = sum(_num_turns(sample) for sample in samples) / episodes
    if turns > 1 or events:
        metrics["train/turns"] = turns
    return metrics | {f"tools/{event}": count / episodes for event, count in events.items()}


def _last_samples(group: Group) -> list[Sample]:
    """Return the last sample of each episode. It has the episode's reward, finish and events."""
    last_of_episode = dict(zip(group.episodes, group.samples, strict=True))
    return list(last_of_episode.values())


def _num_turns(sample: Sample) -> int:
    """Return the number of model turns. Slots that belong to no turn have a negative number."""
    return len(sample.turn.unique()) - bool((sample.turn < 0).any())


class Hook:
    """A set of calls in `train_on_rollouts`. Every method does nothing here."""

    def after_rollout(self, groups: list[Group], timer: StepTimer) -> list[Group]:
        """Return the groups to train on."""
        return groups

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        """Read `result.batch`, the scored batch of the update."""

    def after_update(self, result: StepResult, step: int) -> None:
        """Read `result.batch`, scored by the weights before the update."""


# repr=False: asyncio prints results into error texts, and these are large.
@dataclass(slots=True, repr=False)
class Rollouts:
    """The episodes of a step."""

    groups: list[Group]
    metrics: dict[str, float]  # of the episodes: failed, dropped, refilled


@dataclass(slots=True, repr=False)
class StepResult:
    """The groups, the scored batch and the metrics of a step."""

    groups: list[Group]
    batch: TokenBatch
    # the whole batch scored before the update, with and without replay, in counterfactual steps
    with_replay: TokenBatch | None = None
    without_replay: TokenBatch | None = None
    # the batch scored by the weights that sampled each token (on-policy with rollout.max_staleness)
    own: TokenBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class StepTimer:
    """Seconds of each named part of a step: `with timer("update"): ...`."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return time/PART of every part, and time/step since the timer was made."""
        times = {f"time/{part}": seconds for part, seconds in self.seconds.items()}
        return times | {"time/step": time.perf_counter() - self.start}
