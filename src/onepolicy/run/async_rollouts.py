"""Sampling while learning: the next steps' episodes are played while the learner is busy.

Step s (from 0) updates version s of the weights to version s + 1. Its episodes start when step
s - max_staleness starts. Each token is sampled with the weights that the engine has at the time: a
weight update lets requests continue from their tokens. It follows that

- no token that step s trains on is older than version s - max_staleness, so nothing becomes too
  old and nothing is discarded
- the episodes of at most max_staleness + 1 steps are played or wait at any time.

Problems, seeds and the order of steps are those of the synchronous loop. With max_staleness = 0 the
steps are the same to the bit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.divergence.breakdown import metrics_per_staleness
from onepolicy.run.step import (
    Rollouts,
    StepResult,
    StepRunner,
    StepTimer,
    add_timings,
    push_and_check,
    sample_rollouts,
    train_on_rollouts,
)
from onepolicy.types import Group

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _ScheduledStep:
    """A step whose episodes are being played, or are finished and wait."""

    task: asyncio.Task[Rollouts]
    finished_episodes: int = 0
    on_episode: Callable[[], None] | None = None  # called after each further episode


class RolloutPrefetcher:
    """A player of coming steps' episodes, as far ahead of the learner as max_staleness allows."""

    def __init__(self, runner: StepRunner, first: int) -> None:
        """Start with step `first`, which is scheduled by `run_step` or `schedule`."""
        self.runner, self.components = runner, runner.components
        max_staleness = self.components.config.rollout.max_staleness
        assert max_staleness is not None
        self.max_staleness: int = max_staleness
        self._next = first  # next step to be scheduled
        self._scheduled: dict[int, _ScheduledStep] = {}
        self._active_steps = 0  # steps whose episodes are being played
        self._active_since, self._busy_seconds = 0.0, 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel_all(self._next)

    async def run_step(
        self, step: int, *, advance: Callable[[], None] = lambda: None
    ) -> StepResult:
        """Run one step like `rl_step`, with episodes that started up to max_staleness steps ago.

        Episodes of later steps are played at the same time.
        """
        components, with_recovery = self.components, self.runner.with_recovery
        timer = StepTimer()
        busy_before = self.busy_seconds

        async def episodes() -> Rollouts:
            self.schedule(step)
            return await self.get(step, advance)

        with timer("wait"):
            rollouts = await with_recovery(episodes, partial(self.cancel_all, step))
        with timer("learn"):
            result = await self._train_in_thread(step, rollouts, timer)
        with timer("sync"):
            push = partial(push_and_check, components)
            checked = await with_recovery(push, partial(self.cancel_all, step + 1))
        learn_seconds = timer.seconds.pop("learn")  # its parts have times of their own
        busy_seconds = self.busy_seconds - busy_before
        result = add_timings(components, result, timer)
        result.metrics |= checked
        result.metrics |= staleness_metrics(result.groups, step)
        result.metrics |= metrics_per_staleness(result.batch, step)
        result.metrics |= _overlap_metrics(result.metrics["time/step"], learn_seconds, busy_seconds)
        return result

    async def _train_in_thread(self, step: int, rollouts: Rollouts, timer: StepTimer) -> StepResult:
        """Train in a thread. torch releases the interpreter, so the event loop can sample."""
        try:
            return await asyncio.to_thread(
                train_on_rollouts, self.components, self.runner.hooks, step, rollouts, timer
            )
        except asyncio.CancelledError:  # Ctrl-C; a thread cannot be stopped
            LOG.warning("stopping once the update in progress has ended")
            raise

    def schedule(self, step: int) -> None:
        """Start the episodes of `step` and of the steps that may train on today's tokens."""
        last = min(step + self.max_staleness, self.components.config.steps - 1)
        for each in range(self._next, last + 1):
            self._scheduled[each] = _ScheduledStep(asyncio.create_task(self._play(each)))
        self._next = max(self._next, last + 1)

    async def get(self, step: int, advance: Callable[[], None] = lambda: None) -> Rollouts:
        """Wait for all episodes of `step` and return them. Raises their errors.

        advance: called once per episode, also for those that are already finished. Raises
        TrainingError for a token that is older than max_staleness.
        """
        scheduled = self._scheduled[step]
        for _ in range(scheduled.finished_episodes):
            advance()
        scheduled.on_episode = advance
        rollouts = await scheduled.task
        del self._scheduled[step]
        oldest = int(token_versions(rollouts.groups).min())
        if oldest < step - self.max_staleness:
            raise TrainingError(
                f"rollout.max_staleness: {self.max_staleness}, but the engine reports that weights "
                f"of version {oldest} sampled a token of step {step + 1}, whose weights are of "
                f"version {step}; it did not take an update"
            )
        return rollouts

    async def cancel_all(self, step: int) -> None:
        """Cancel all episodes. The next `schedule` starts again with `step`."""
        tasks = [scheduled.task for scheduled in self._scheduled.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._scheduled.clear()
        self._next = step

    @property
    def idle(self) -> bool:
        """True if no episode is being played."""
        return self._active_steps == 0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which episodes were played."""
        if self.idle:
            return self._busy_seconds
        return self._busy_seconds + time.perf_counter() - self._active_since

    async def _play(self, step: int) -> Rollouts:
        if self.idle:
            self._active_since = time.perf_counter()
        self._active_steps += 1
        try:
            on_episode = partial(self._count_episode, step)
            return await sample_rollouts(self.components, step, on_episode)
        finally:
            self._active_steps -= 1
            if self.idle:
                self._busy_seconds += time.perf_counter() - self._active_since

    def _count_episode(self, step: int) -> None:
        scheduled = self._scheduled[step]
        scheduled.finished_episodes += 1
        if scheduled.on_episode is not None:
            scheduled.on_episode()


def token_versions(groups: list[Group]) -> Tensor:
    """Return the version [n] int32 of every trainable token."""
    samples = [sample for group in groups for sample in group.samples]
    return torch.cat([sample.version[sample.trainable] for sample in samples])


def staleness_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """Return staleness/...: the age of the tokens when version `version` is trained on them."""
    age = (version - token_versions(groups)).float()
    samples = [sample.version[sample.trainable] for group in groups for sample in group.samples]
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": float(age.max()),
        "staleness/tokens": float((age > 0).float().mean()),
        "staleness/spanning": sum(len(each.unique()) > 1 for each in samples) / len(samples),
    }


def _overlap_metrics(
    step_seconds: float, learn_seconds: float, busy_seconds: float
) -> dict[str, float]:
    """Return the times in which learner and sampler were busy. busy_seconds: of the sampler."""
    return {
        "time/sampler_idle": max(0.0, step_seconds - busy_seconds),
        "async/learner_busy": learn_seconds / step_seconds,
        "async/sampler_busy": min(1.0, busy_seconds / step_seconds),
    }
