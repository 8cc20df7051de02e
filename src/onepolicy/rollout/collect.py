"""The rollouts of a step: every problem is played `group_size` times, all at once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from onepolicy.config import RolloutConfig, TrainingError
from onepolicy.interfaces import (
    Environment,
    EpisodeError,
    MetricsSource,
    NamedEngine,
    Problem,
    RolloutEngine,
)
from onepolicy.replay.checks import RouteSpec, check_completion, fill_missing_routes
from onepolicy.support.checks import MissingSupportError, check_supports
from onepolicy.support.trace import SupportTrace
from onepolicy.types import MAX_LOGP, PLAYERS, Completion, Group, Sample, Sampling

T = TypeVar("T")
SUPPORT_COUNTS = ("rollout/missing_supports", "rollout/dropped_without_support")


def request_seed(
    run_seed: int, problem_id: int, step: int, member: int, turn: int = 0, *, attempt: int = 0
) -> int:
    """Return the seed of one request.

    It is a pure function of the arguments, so a resumed run draws the same numbers.
    """
    key: tuple[int, ...] = (run_seed, problem_id, step, member, turn)
    if attempt:
        key = (*key, attempt)
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")


def check_sampled_tokens(completion: Completion, name: str) -> None:
    """Raise TrainingError for tokens that an engine cannot have sampled.

    name: of the sample, for the error.
    """
    count, logp = len(completion.token_ids), completion.logp
    if len(logp) != count or len(completion.version) != count:
        raise TrainingError(
            f"{name}: the engine returned {count} tokens, {len(logp)} log-probabilities and "
            f"{len(completion.version)} versions"
        )
    valid = logp.isfinite() & (logp <= MAX_LOGP)
    if not valid.all():
        raise TrainingError(
            f"{name}: the engine returned {logp[~valid][0].tolist()} as the log-probability of a "
            "token it sampled"
        )


def check_support(completion: Completion, name: str) -> None:
    """Raise SupportError unless every sampled token has a set that it is in.

    name: of the sample, for the error.
    """
    support = completion.support or SupportTrace.missing(len(completion.token_ids))
    check_supports(support, completion.token_ids, name=name)


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
    """Play one episode and return its samples.

    `seeds(turn)` is the seed of the turn's request. Routes are checked as they arrive. name: of
    the episode, for errors.
    """
    turn = first = 0

    async def sample(
        tokens: Sequence[int], *, max_tokens: int | None = None, routes_from: int = 0, root: int = 0
    ) -> Completion:
        nonlocal turn, first
        turn += 1
        first = first or len(tokens)
        limit = sampling.max_tokens
        if max_tokens is not None:
            limit = min(max_tokens, limit)
        turn_sampling = dataclasses.replace(
            sampling,
            max_tokens=limit,
            routes_from=routes_from,
            initial_prompt_len=root or first,
        )
        completion = await engine.generate(tokens, turn_sampling, seed=seeds(turn - 1))
        turn_name = f"{name}, turn {turn - 1}"
        check_sampled_tokens(completion, turn_name)
        if sampling.support:
            check_support(completion, turn_name)
        held = None
        if isinstance(engine, NamedEngine):
            held = engine.adapter
        if completion.adapter != held:
            raise TrainingError(
                f"{turn_name}: sampled with adapter {completion.adapter!r}, but the engine holds "
                f"{held!r}; the request did not name it"
            )
        check_completion(completion, tokens, route_spec, turn_name)
        return completion

    samples = await environment.episode(problem, sample, sampling.temperature)
    return tuple(fill_missing_routes(sample, route_spec, name) for sample in samples)


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all awaitables.

    If one fails, cancel the others and wait for their end before raising its error, so that no
    task still sends requests to the engine.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _GroupPlayer:
    """The player of one step's episodes. It counts the episodes and groups that fail."""

    engine: RolloutEngine
    environment: Environment
    config: RolloutConfig
    sampling: Sampling
    step: int
    seed: int  # of the run
    route_spec: RouteSpec | None
    advance: Callable[[], None]
    counts: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""

    def __post_init__(self) -> None:
        self._failures: tuple[type[Exception], ...] = (EpisodeError,)
        if self.sampling.support and self.config.sampling.missing_support == "drop":
            self._failures = EpisodeError, MissingSupportError
            self.counts.update(dict.fromkeys(SUPPORT_COUNTS, 0))  # logged also if nothing lacks

    async def play_groups(self, problems: Sequence[Problem]) -> list[Group]:
        """Play group_size episodes of every problem at once. Return the groups that survive."""
        size = self.config.group_size
        played = await gather_or_cancel(
            self._play_member(problem, member) for problem in problems for member in range(size)
        )
        groups = []
        for i, problem in enumerate(problems):
            episodes = [samples for samples in played[i * size : (i + 1) * size] if samples]
            complete = len(episodes) == size
            if not complete and len(episodes) < self.config.smallest_group:
                self.counts["rollout/groups_dropped"] += 1
                continue
            samples = tuple(itertools.chain.from_iterable(episodes))
            groups.append(Group(problem.id, samples, problem.answer))
        return groups

    async def _play_member(self, problem: Problem, member: int) -> tuple[Sample, ...]:
        """Return the samples of one episode, none if all its attempts failed."""
        name = f"problem {problem.id}, sample {member}"
        samples: tuple[Sample, ...] | None = None
        missing = 0  # attempts that lacked a support
        for attempt in range(1 + self.config.episode_retries):
            try:
                samples = await self._attempt_episode(problem, member, attempt, name)
                break
            except self._failures as error:
                self.counts["rollout/episodes_failed"] += 1
                missing += isinstance(error, MissingSupportError)
                self.last_failure = f"{name}: {error}"
        self.advance()
        if missing:
            self.counts["rollout/missing_supports"] += missing
            self.counts["rollout/dropped_without_support"] += samples is None
        if samples is None:
            self.counts["rollout/episodes_dropped"] += 1
            return ()
        return tuple(dataclasses.replace(sample, episode=member) for sample in samples)

    async def _attempt_episode(
        self, problem: Problem, member: int, attempt: int, name: str
    ) -> tuple[Sample, ...]:
        seeds = functools.partial(
            request_seed, self.seed, problem.id, self.step, member, attempt=attempt
        )
        return await play_episode(
            self.engine,
            self.environment,
            problem,
            self.sampling,
            seeds,
            route_spec=self.route_spec,
            name=name,
        )


async def collect_rollouts(
    engine: RolloutEngine,
    environment: Environment,
    config: RolloutConfig,
    sampling: Sampling,
    *,
    step: int,
    seed: int,
    route_spec: RouteSpec | None = None,
    advance: Callable[[], None] = lambda: None,
    accept: Callable[[Group], bool] | None = None,
    rounds: int = 0,
) -> tuple[list[Group], dict[str, float]]:
    """Return the groups of step `step` in problem order, and the metrics of its episodes.

    An episode that fails (EpisodeError; with missing_support = "drop" also one with a token without
    its support) is played again with other seeds, config.episode_retries times, then dropped. A
    support that is there but wrong always stops the run: the engine's next ones would be no
    better. A group with fewer than config.min_group_size episodes is dropped whole.
    Dynamic sampling (DAPO section 3.2): groups that `accept` refuses are replaced by further
    problems, up to `rounds` more times. Step s owns the problems from
    s * prompts_per_step * (1 + rounds) on, so a resumed run draws the same. A step may have fewer
    than prompts_per_step groups. `advance` is called after every episode. route_spec: None for a
    dense model.

    Raises TrainingError if no group is left, and UsageError with problem, sample, layer and row
    if the engine's routes break `route_spec`.
    """
    player = _GroupPlayer(engine, environment, config, sampling, step, seed, route_spec, advance)
    num_groups = config.prompts_per_step
    first_index = step * num_groups * (1 + rounds)
    kept: list[Group] = []
    played = rounds_played = 0
    PLAYERS.set(object())
    while len(kept) < num_groups and rounds_played <= rounds:
        start = first_index + played
        indices = range(start, start + num_groups - len(kept))
        groups = await player.play_groups([environment.train_problem(i) for i in indices])
        kept += [group for group in groups if accept is None or accept(group)]
        played += len(indices)
        rounds_played += 1
    if not kept:
        raise _no_group_error(player, played)
    metrics: dict[str, float] = dict(player.counts)  # a Counter would drop a refill count of 0
    if isinstance(environment, MetricsSource):
        metrics |= environment.take_metrics()
    if accept is not None:
        metrics |= {
            "rollout/groups_played": played,
            "rollout/groups_kept": len(kept),
            "rollout/refills": rounds_played - 1,
        }
    return kept, metrics


def _no_group_error(player: _GroupPlayer, played: int) -> TrainingError:
    counts, step = player.counts, player.step + 1
    dropped = counts["rollout/groups_dropped"]
    if dropped == played:
        return TrainingError(
            f"step {step}: no group has {player.config.smallest_group} episodes that were played "
            f"to their end; {counts['rollout/episodes_failed']} attempts failed, the last one: "
            f"{player.last_failure}"
        )
    return TrainingError(
        f"objective.dynamic_sampling: all {played - dropped} problems of step {step} had equal "
        f"rewards ({dropped} groups dropped); choose easier or harder problems, raise "
        "rollout.group_size, or set objective.dynamic_sampling to 0"
    )
