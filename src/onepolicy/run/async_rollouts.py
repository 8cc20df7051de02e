"""Sampling while learning: the next steps' episodes are played while the learner is busy with this one.

Step s (from 0) updates version s of the weights to s + 1. Its episodes start when step s - max_staleness does, and each
token is sampled by whatever weights the engine has by then; an update lets requests go on from their tokens. So no
token that step s is trained on is older than version s - max_staleness: nothing can become too old, nothing is thrown
away, and no more than max_staleness + 1 steps' episodes are ever in play or waiting. Steps have the problems, seeds and
order of the synchronous loop; with max_staleness 0 they are the same to the bit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from onepolicy.build.components import Components
from onepolicy.config import TrainingError
from onepolicy.run.recovery import retry_on_engine_loss
from onepolicy.run.result import Rollouts, StepResult, StepTimer
from onepolicy.run.step import add_timings, sample_rollouts, train_on_rollouts
from onepolicy.run.step_metrics import metrics_per_staleness
from onepolicy.sync.push import push_weights
from onepolicy.types import Group

LOG = logging.getLogger(__name__)


class RolloutPrefetcher:
    """Plays the episodes of steps `first`, first + 1, ... as far ahead of the learner as max_staleness allows."""

    def __init__(self, parts: Components, first: int) -> None:
        assert parts.config.rollout.max_staleness is not None
        self.parts, self.max_staleness = parts, parts.config.rollout.max_staleness
        self._next = first  # step to be started
        self._playing: dict[int, asyncio.Task[Rollouts]] = {}
        self._ended: dict[int, int] = {}  # episodes of each step in play that have
        self._show: dict[int, Callable[[], None]] = {}
        self._steps, self._since, self._busy = 0, 0.0, 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.cancel_all(self._next)

    async def cancel_all(self, step: int) -> None:
        """End what is in play; `step` and what follows it is to be played again from its beginning, by `schedule`."""
        tasks = list(self._playing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for of_step in (self._playing, self._ended, self._show):
            of_step.clear()
        self._next = step

    def schedule(self, step: int) -> None:
        """`step` begins: with it and what follows it, as far as tokens of today's weights may be trained on there."""
        last = min(step + self.max_staleness, self.parts.config.steps - 1)
        for each in range(self._next, last + 1):
            self._ended[each] = 0
            self._playing[each] = asyncio.create_task(self._play(each))
        self._next = max(self._next, last + 1)

    async def get(self, step: int, advance: Callable[[], None] = lambda: None) -> Rollouts:
        """The episodes of `step` once all have ended; advance is called for each. Their errors come out here."""
        for _ in range(self._ended[step]):
            advance()
        self._show[step] = advance
        rollouts = await self._playing[step]
        for of_step in (self._playing, self._ended, self._show):
            del of_step[step]
        if (oldest := int(token_versions(rollouts.groups).min())) < step - self.max_staleness:
            raise TrainingError(
                f"rollout.max_staleness: {self.max_staleness}, but the engine says that weights of version {oldest} "
                f"sampled a token of step {step + 1}, whose weights are of version {step}; it did not take an update"
            )
        return rollouts

    async def run_step(
        self, step: int, *, advance: Callable[[], None] = lambda: None
    ) -> StepResult:
        """`rl_step` with episodes that began up to max_staleness steps ago, and others going on beside it."""
        parts, timer, busy = self.parts, StepTimer(), self.busy_seconds

        async def episodes() -> Rollouts:
            self.schedule(step)
            return await self.get(step, advance)

        with timer("wait"):
            rollouts = await retry_on_engine_loss(parts, episodes, partial(self.cancel_all, step))
        with timer("learn"):  # torch lets go of the interpreter, so the event loop goes on sampling
            try:
                result = await asyncio.to_thread(train_on_rollouts, parts, step, rollouts, timer)
            except asyncio.CancelledError:  # Ctrl-C; a thread cannot be stopped
                LOG.warning("stopping once the update in progress has ended")
                raise
        with timer("sync"):
            push = partial(push_weights, parts.learner, *parts.samplers)
            await retry_on_engine_loss(parts, push, partial(self.cancel_all, step + 1))
        learning, busy = timer.seconds.pop("learn"), self.busy_seconds - busy
        result = add_timings(parts, result, timer)
        whole = result.metrics["time/step"]
        result.metrics |= staleness_metrics(result.groups, step) | metrics_per_staleness(
            result.batch, step
        )
        result.metrics |= {
            "time/sampler_idle": max(0.0, whole - busy),
            "async/learner_busy": learning / whole,
            "async/sampler_busy": min(1.0, busy / whole),
        }
        return result

    @property
    def idle(self) -> bool:
        """No episode is in play."""
        return self._steps == 0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which episodes were in play."""
        return self._busy + (time.perf_counter() - self._since if self._steps else 0.0)

    async def _play(self, step: int) -> Rollouts:
        if self.idle:
            self._since = time.perf_counter()
        self._steps += 1
        try:
            return await sample_rollouts(self.parts, step, lambda: self._episode_ended(step))
        finally:
            self._steps -= 1
            if self.idle:
                self._busy += time.perf_counter() - self._since

    def _episode_ended(self, step: int) -> None:
        self._ended[step] += 1
        if step in self._show:
            self._show[step]()


def token_versions(groups: list[Group]) -> Tensor:
    """[n] int32, of every trainable token."""
    return torch.cat(
        [sample.version[sample.trainable] for group in groups for sample in group.samples]
    )


def staleness_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """How much older than `version`, which is trained, the weights that sampled these tokens are."""
    age = (version - token_versions(groups)).float()
    samples = [sample.version[sample.trainable] for group in groups for sample in group.samples]
    return {
        "staleness/mean": float(age.mean()),
        "staleness/max": float(age.max()),
        "staleness/tokens": float((age > 0).float().mean()),
        "staleness/spanning": sum(len(each.unique()) > 1 for each in samples) / len(samples),
    }
