"""Drive a step's episodes: every problem is played `group_size` times, all at once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from onepolicy.config import RolloutConfig, TrainingError
from onepolicy.interfaces import Environment, EpisodeError, MetricsSource, Problem, RolloutEngine
from onepolicy.replay.checks import RouteSpec, check_completion, fill_missing_routes
from onepolicy.types import MAX_LOGP, Completion, Group, Sample, Sampling

T = TypeVar("T")


def request_seed(
    run_seed: int, problem_id: int, step: int, member: int, turn: int = 0, *, attempt: int = 0
) -> int:
    """Seed of one request: a pure function of its place in the run, so that a resumed run draws the same numbers."""
    key = (run_seed, problem_id, step, member, turn, attempt)
    place = repr(key if attempt else key[:-1]).encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "little")


def check_sampled_tokens(completion: Completion, name: str) -> None:
    """TrainingError for tokens that an engine cannot have sampled. `name` says which sample it is."""
    count, logp = len(completion.token_ids), completion.logp
    if len(logp) != count or len(completion.version) != count:
        raise TrainingError(
            f"{name}: the engine returned {count} tokens, {len(logp)} log-probabilities and {len(completion.version)} "
            "versions"
        )
    if not (logp.isfinite() & (logp <= MAX_LOGP)).all():
        wrong = logp[~(logp.isfinite() & (logp <= MAX_LOGP))][0].tolist()
        raise TrainingError(
            f"{name}: the engine returned {wrong} as the log-probability of a token it sampled"
        )


async def play_episode(
    engine: RolloutEngine,
    environment: Environment,
    problem: Problem,
    sampling: Sampling,
    seeds: Callable[[int], int],
    *,
    route_spec: RouteSpec | None = None,
    name: str = "",
) -> tuple[Sample, ...]:
    """One episode; `seeds(turn)` seeds each of its requests. Routes are checked as they arrive (`name` in errors)."""
    turn = initial_prompt_len = 0

    async def sample(
        tokens: Sequence[int], *, max_tokens: int | None = None, routes_from: int = 0
    ) -> Completion:
        nonlocal turn, initial_prompt_len
        turn += 1
        initial_prompt_len = initial_prompt_len or len(tokens)
        limit = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
        asked = dataclasses.replace(
            sampling,
            max_tokens=limit,
            routes_from=routes_from,
            initial_prompt_len=initial_prompt_len,
        )
        completion = await engine.generate(tokens, asked, seed=seeds(turn - 1))
        check_sampled_tokens(completion, f"{name}, turn {turn - 1}")
        check_completion(completion, tokens, route_spec, f"{name}, turn {turn - 1}")
        return completion

    samples = await environment.episode(problem, sample, sampling.temperature)
    return tuple(fill_missing_routes(sample, route_spec, name) for sample in samples)


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Their results. If one fails the others end before its error is raised: none goes on asking the engine."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect_rollouts(
    engine: RolloutEngine,
    environment: Environment,
    config: RolloutConfig,
    *,
    stop: tuple[int, ...],
    step: int,
    seed: int,
    route_spec: RouteSpec | None = None,
    advance: Callable[[], None] = lambda: None,
    accept: Callable[[Group], bool] | None = None,
    rounds: int = 0,
    top_logprobs: int = 0,
) -> tuple[list[Group], dict[str, float]]:
    """The groups of step `step`, in problem order, and what became of the episodes. `advance` is called per episode.

    An episode that fails (EpisodeError) is played again with other seeds, config.episode_retries times, then dropped;
    a group with fewer than config.min_group_size left is dropped whole. Dynamic sampling (DAPO section 3.2): groups that
    `accept` refuses are replaced by further problems, up to `rounds` more times. Step s owns the problems from
    s * prompts_per_step * (1 + rounds) on, so a resumed run draws the same. A step may come out smaller than
    prompts_per_step; TrainingError if no group is left, UsageError if an engine's routes break `route_spec` (None: a dense
    model), naming problem, sample, layer and row. top_logprobs: see Sampling.
    """
    sampling = Sampling(
        config.sampling.temperature,
        config.sampling.max_tokens,
        stop=stop,
        top_logprobs=top_logprobs,
    )
    wanted, size = config.prompts_per_step, config.group_size
    index = step * wanted * (1 + rounds)
    counts: Counter[str] = Counter()
    failure = ""

    async def member(problem: Problem, m: int) -> tuple[Sample, ...]:
        nonlocal failure
        name = f"problem {problem.id}, sample {m}"
        for attempt in range(1 + config.episode_retries):
            seeds = functools.partial(request_seed, seed, problem.id, step, m, attempt=attempt)
            try:
                samples = await play_episode(
                    engine, environment, problem, sampling, seeds, route_spec=route_spec, name=name
                )
            except EpisodeError as error:
                counts["rollout/episodes_failed"] += 1
                failure = f"{name}: {error}"
                continue
            advance()
            return tuple(dataclasses.replace(sample, episode=m) for sample in samples)
        counts["rollout/episodes_dropped"] += 1
        advance()
        return ()

    async def play_groups(problems: list[Problem]) -> list[Group]:
        played = await gather_or_cancel(
            member(problem, m) for problem in problems for m in range(size)
        )
        groups = []
        for i, problem in enumerate(problems):
            episodes = [samples for samples in played[i * size : (i + 1) * size] if samples]
            if len(episodes) >= config.smallest_group:
                groups.append(
                    Group(
                        problem.id,
                        tuple(s for samples in episodes for s in samples),
                        problem.answer,
                    )
                )
            else:
                counts["rollout/groups_dropped"] += 1
        return groups

    kept: list[Group] = []
    played = used = 0
    while len(kept) < wanted and used <= rounds:
        problems = [
            environment.train_problem(index + played + i) for i in range(wanted - len(kept))
        ]
        groups = await play_groups(problems)
        kept += groups if accept is None else filter(accept, groups)
        played, used = played + len(problems), used + 1
    if not kept and counts["rollout/groups_dropped"]:
        raise TrainingError(
            f"step {step + 1}: no group has {config.smallest_group} episodes that could be played to their end; "
            f"{counts['rollout/episodes_failed']} attempts failed, the last one: {failure}"
        )
    if not kept:
        raise TrainingError(
            f"objective.dynamic_sampling: all {played} problems of step {step + 1} had equal rewards; "
            "take easier or harder problems, more rollout.group_size, or set objective.dynamic_sampling to 0"
        )
    metrics: dict[str, float] = dict(counts)  # a Counter would drop a refill count of 0
    if isinstance(environment, MetricsSource):
        metrics |= environment.take_metrics()
    if accept is not None:
        metrics |= {
            "rollout/groups_played": played,
            "rollout/groups_kept": len(kept),
            "rollout/refills": used - 1,
        }
    return kept, metrics
