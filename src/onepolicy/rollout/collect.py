"""Drive a step's episodes: every problem is played `group_size` times, all at once."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Sequence

from onepolicy.config import RolloutConfig, TrainingError
from onepolicy.interfaces import Environment, Problem, RolloutEngine
from onepolicy.replay.checks import RouteRules, check_completion, with_routes
from onepolicy.types import Completion, Group, Sample, Sampling


def seed_of(run_seed: int, problem_id: int, step: int, member: int, turn: int = 0) -> int:
    """Seed of one request: a pure function of its place in the run, so that a resumed run draws the same numbers."""
    place = repr((run_seed, problem_id, step, member, turn)).encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=7).digest(), "little")


async def play(
    engine: RolloutEngine,
    environment: Environment,
    problem: Problem,
    sampling: Sampling,
    seeds: Callable[[int], int],
    *,
    routes: RouteRules | None = None,
    name: str = "",
) -> Sample:
    """One episode; `seeds(turn)` seeds each of its requests. Routes are checked as they arrive (`name` in errors)."""
    turn = 0

    async def sample(prompt_ids: Sequence[int]) -> Completion:
        nonlocal turn
        turn += 1
        completion = await engine.generate(prompt_ids, sampling, seed=seeds(turn - 1))
        check_completion(completion, prompt_ids, routes, f"{name}, turn {turn - 1}")
        return completion

    return with_routes(await environment.episode(problem, sample, sampling.temperature), routes, name)


async def collect(
    engine: RolloutEngine,
    environment: Environment,
    config: RolloutConfig,
    *,
    stop: tuple[int, ...],
    step: int,
    seed: int,
    routes: RouteRules | None = None,
    advance: Callable[[], None] = lambda: None,
    accept: Callable[[Group], bool] | None = None,
    rounds: int = 0,
    top_logprobs: int = 0,
) -> tuple[list[Group], dict[str, float]]:
    """The groups of step `step`, in problem order, and what refilling took. `advance` is called per episode (progress).

    Dynamic sampling (DAPO section 3.2): groups that `accept` refuses are replaced by further problems, up to `rounds`
    more times. Step s owns the problems from s * prompts_per_step * (1 + rounds) on, so a resumed run draws the same. A
    step may come out smaller than prompts_per_step; TrainingError if no group is left, UsageError if an engine's routes
    break `routes` (None: a dense model), naming problem, sample, layer and row. top_logprobs: see Sampling.
    """
    sampling = Sampling(config.sampling.temperature, config.sampling.max_tokens, stop=stop, top_logprobs=top_logprobs)
    wanted, size = config.prompts_per_step, config.group_size
    index = step * wanted * (1 + rounds)

    async def member(problem: Problem, m: int) -> Sample:
        seeds = functools.partial(seed_of, seed, problem.id, step, m)
        name = f"problem {problem.id}, sample {m}"
        sample = await play(engine, environment, problem, sampling, seeds, routes=routes, name=name)
        advance()
        return sample

    async def play_groups(problems: list[Problem]) -> list[Group]:
        samples = await asyncio.gather(*(member(problem, m) for problem in problems for m in range(size)))
        return [Group(p.id, tuple(samples[i * size : (i + 1) * size]), p.answer) for i, p in enumerate(problems)]

    kept: list[Group] = []
    played = used = 0
    while len(kept) < wanted and used <= rounds:
        problems = [environment.train_problem(index + played + i) for i in range(wanted - len(kept))]
        groups = await play_groups(problems)
        kept += groups if accept is None else filter(accept, groups)
        played, used = played + len(problems), used + 1
    if not kept:
        raise TrainingError(
            f"objective.dynamic_sampling: all {played} problems of step {step + 1} had equal rewards; "
            "take easier or harder problems, more rollout.group_size, or set objective.dynamic_sampling to 0"
        )
    if accept is None:
        return kept, {}
    return kept, {"rollout/groups_played": played, "rollout/groups_kept": len(kept), "rollout/refills": used - 1}
