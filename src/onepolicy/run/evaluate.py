"""Held-out evaluation: greedy accuracy, avg@k and pass@k."""

from __future__ import annotations

import functools
from collections.abc import Callable

from onepolicy.config import EvalConfig, TrainingError
from onepolicy.interfaces import Environment, EpisodeError, MetricsSource, Problem, RolloutEngine
from onepolicy.rollout.collect import gather_or_cancel, play_episode, request_seed
from onepolicy.types import Sample, Sampling

RETRIES = 2  # of an episode whose tool or environment failed


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
    """A response counts as solved if its reward is at least `solved_at`.

    avg@k: mean over problems of the share of k sampled responses that are solved. pass@k: share of problems of which
    at least one of the k is. The same problems and seeds every time, so evaluations of one run are comparable.
    TrainingError if an episode fails (EpisodeError) time after time: a score without it would be of other problems.
    """
    problems = environment.held_out(config.problems)
    greedy = Sampling(0.0, max_tokens, stop=stop)
    sampled = Sampling(config.temperature, max_tokens, config.top_p, config.top_k, stop)

    async def attempt(problem: Problem, sampling: Sampling, member: int) -> tuple[Sample, ...]:
        for again in range(1 + RETRIES):
            seeds = functools.partial(request_seed, seed, problem.id, -1, member, attempt=again)
            try:
                samples = await play_episode(engine, environment, problem, sampling, seeds)
            except EpisodeError as error:
                failure = error
                continue
            advance()
            return samples
        raise TrainingError(
            f"evaluation: problem {problem.id} could not be played to its end, {1 + RETRIES} times: {failure}"
        ) from failure

    first = [attempt(p, greedy, -1) for p in problems] if config.greedy else []
    rest = [attempt(p, sampled, m) for p in problems for m in range(config.k)]
    episodes = await gather_or_cancel([*first, *rest])
    if isinstance(environment, MetricsSource):
        environment.take_metrics()  # what ran out of time here is not the next step's
    solved = [samples[-1].reward >= solved_at for samples in episodes]
    metrics = {
        "eval/response_length": sum(s.response_length for played in episodes for s in played)
        / len(episodes)
    }
    if config.greedy:
        metrics["eval/greedy"] = sum(solved[: len(problems)]) / len(problems)
    if config.k:
        tries = solved[len(first) :]
        by_problem = [tries[i : i + config.k] for i in range(0, len(tries), config.k)]
        metrics[f"eval/avg@{config.k}"] = sum(tries) / len(tries)
        metrics[f"eval/pass@{config.k}"] = sum(map(any, by_problem)) / len(problems)
    return metrics


def num_eval_episodes(config: EvalConfig) -> int:
    """Responses one evaluation samples."""
    return config.problems * (int(config.greedy) + config.k)
