"""Held-out evaluation: greedy accuracy, avg@k and pass@k."""

from __future__ import annotations

import functools
from collections.abc import Callable

from onepolicy.config import EvalConfig, TrainingError
from onepolicy.interfaces import Environment, EpisodeError, MetricsSource, Problem, RolloutEngine
from onepolicy.rollout.collect import gather_or_cancel, play_episode, request_seed
from onepolicy.types import PLAYERS, Sample, Sampling

MAX_RETRIES = 2  # of an episode whose tool or environment failed


async def evaluate(
    engine: RolloutEngine,
    environment: Environment,
    config: EvalConfig,
    *,
    stop: tuple[int, ...],
    max_tokens: int,
    solved_at: float = 1.0,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Evaluate the engine's weights on held-out problems.

    A response is solved if its reward is at least `solved_at`. avg@k is the mean over problems of
    the fraction of k sampled responses that are solved. pass@k is the fraction of problems with at
    least one solved response among the k. Problems and seeds are the same every time, so
    evaluations of one run are comparable.

    Raises TrainingError if an episode fails again and again (EpisodeError): a score without it
    would be that of other problems.
    """
    problems = environment.held_out(config.problems)
    greedy = Sampling(0.0, max_tokens, stop=stop)
    narrowed = config.top_p, config.top_k, config.min_p
    sampled = Sampling(config.temperature, max_tokens, *narrowed, stop=stop)

    async def play(problem: Problem, sampling: Sampling, member: int) -> tuple[Sample, ...]:
        seeds = functools.partial(request_seed, seed, problem.id, -1, member)
        samples = await _play_with_retries(engine, environment, problem, sampling, seeds)
        advance()
        return samples

    plays = []
    if config.greedy:
        plays += [play(problem, greedy, -1) for problem in problems]
    plays += [play(problem, sampled, member) for problem in problems for member in range(config.k)]
    PLAYERS.set(object())
    episodes = await gather_or_cancel(plays)
    if isinstance(environment, MetricsSource):
        environment.take_metrics()  # discarded, no step reports them
    solved = [samples[-1].reward >= solved_at for samples in episodes]
    lengths = [sample.response_length for samples in episodes for sample in samples]
    metrics = {"eval/response_length": sum(lengths) / len(episodes)}
    return metrics | _accuracy(solved, len(problems), config)


async def _play_with_retries(
    engine: RolloutEngine,
    environment: Environment,
    problem: Problem,
    sampling: Sampling,
    seeds: functools.partial[int],
) -> tuple[Sample, ...]:
    for attempt in range(1 + MAX_RETRIES):
        seeds_of_attempt = functools.partial(seeds, attempt=attempt)
        try:
            return await play_episode(engine, environment, problem, sampling, seeds_of_attempt)
        except EpisodeError as error:
            failure = error
    raise TrainingError(
        f"evaluation: problem {problem.id} could not be played to its end, {1 + MAX_RETRIES} "
        f"times: {failure}"
    ) from failure


def _accuracy(solved: list[bool], problems: int, config: EvalConfig) -> dict[str, float]:
    """Return eval/greedy, eval/avg@k and eval/pass@k.

    solved: the greedy response of every problem, if there is one; then k of each problem.
    """
    metrics: dict[str, float] = {}
    if config.greedy:
        metrics["eval/greedy"] = sum(solved[:problems]) / problems
        solved = solved[problems:]
    if config.k:
        by_problem = [solved[i : i + config.k] for i in range(0, len(solved), config.k)]
        metrics[f"eval/avg@{config.k}"] = sum(solved) / len(solved)
        metrics[f"eval/pass@{config.k}"] = sum(map(any, by_problem)) / problems
    return metrics


def num_eval_episodes(config: EvalConfig) -> int:
    """Return the number of episodes of one evaluation."""
    return config.problems * (int(config.greedy) + config.k)
