"""Drop episodes in which the engine returned a token without its support."""

from __future__ import annotations

from onepolicy.interfaces import Environment, EpisodeError, MetricsSource, Problem, SampleFn
from onepolicy.support.checks import MissingSupportError
from onepolicy.types import Sample


class DroppingEnvironment:
    """An environment whose episode fails, and is counted, if a sampled token has no support.

    A failed episode is played again, then dropped (rollout/collect.py). A support that is there but
    wrong still stops the run: the next ones of the engine would be no better.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._missing = 0
        self.train_problem = environment.train_problem
        self.held_out = environment.held_out
        self.check = environment.check

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        try:
            return await self._environment.episode(problem, sample, temperature)
        except MissingSupportError as error:
            self._missing += 1
            raise EpisodeError(str(error)) from error

    def take_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {"rollout/missing_supports": self._missing}
        self._missing = 0
        if isinstance(self._environment, MetricsSource):
            metrics |= self._environment.take_metrics()
        return metrics
