"""Episodes that fail are played again with other seeds, or dropped and counted. A group with too
few left is dropped whole."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.config import EvalConfig, ObjectiveConfig, RolloutConfig, TrainingError
from onepolicy.envs.counts import Counts
from onepolicy.interfaces import EpisodeError, Problem
from onepolicy.objective.advantages import apply_group_baseline, compute_outcomes
from onepolicy.rollout.collect import collect_rollouts, request_seed
from onepolicy.run.evaluate import evaluate
from onepolicy.support.checks import MissingSupportError, SupportError
from onepolicy.support.trace import SupportTrace
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Group, Sampling
from support.objective_batches import group


class Engine:
    """An engine that answers with its seed, so that a test sees the seeds that were used."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, tokens: list[int], sampling: Sampling, *, seed: int) -> Completion:
        self.seeds.append(seed)
        one = torch.ones(1, dtype=torch.int32)
        return Completion(one, torch.tensor([-1.0]), one, "stop")


class Failing:
    """An environment whose episodes fail. `failures`: for each problem, its failing episodes,
    counted in the order they start."""

    def __init__(self, failures: dict[int, set[int]]) -> None:
        self.failures, self.started = failures, dict.fromkeys(range(9), 0)

    def train_problem(self, index: int) -> Problem:
        return Problem(index, "", "")

    async def episode(self, problem, sample, temperature):
        started = self.started[problem.id]
        self.started[problem.id] += 1
        await sample([1, 2])
        if started in self.failures.get(problem.id, set()):
            raise EpisodeError(f"tool died in episode {started}")
        return group([float(problem.id)]).samples


PLAIN = Sampling(1.0, 8)


def collect(engine, environment, *, asks=PLAIN, **settings):
    config = RolloutConfig(**{"prompts_per_step": 2, "group_size": 4} | settings)
    return asyncio.run(collect_rollouts(engine, environment, config, asks, step=3, seed=5))


def run(failures, **settings):
    engine = Engine()
    return *collect(engine, Failing(failures), **settings), engine


def evaluated(environment):
    engine, config = Engine(), EvalConfig(problems=2, greedy=True, k=0)
    environment.held_out = lambda count: [environment.train_problem(i) for i in range(count)]
    metrics = asyncio.run(evaluate(engine, environment, config, stop=(), max_tokens=1))
    return metrics, engine.seeds


def test_a_failed_episode_is_played_again_with_other_seeds():
    groups, metrics, engine = run({6: {0, 2}})
    assert [len(g.samples) for g in groups] == [4, 4]
    assert metrics == {"rollout/episodes_failed": 2}
    # started 0 and 2: a retry starts at once
    assert {request_seed(5, 6, 3, m, attempt=1) for m in (0, 1)} < set(engine.seeds)
    assert len(set(engine.seeds)) == 10


def test_an_episode_that_keeps_failing_is_dropped_and_counted():
    groups, metrics, _ = run({6: {1}}, episode_retries=0)
    assert [g.problem_id for g in groups] == [6, 7]
    assert [g.episodes for g in groups] == [[0, 2, 3], [0, 1, 2, 3]]
    assert metrics == {"rollout/episodes_failed": 1, "rollout/episodes_dropped": 1}


def test_a_group_with_too_few_episodes_is_dropped_whole():
    groups, metrics, _ = run({6: {0, 1, 2}}, episode_retries=0)
    assert [g.problem_id for g in groups] == [7]
    counted = {"episodes_failed": 3, "episodes_dropped": 3, "groups_dropped": 1}
    assert metrics == {f"rollout/{name}": count for name, count in counted.items()}
    groups, _, _ = run({6: {0, 1, 2}}, episode_retries=0, min_group_size=1)
    assert [len(g.samples) for g in groups] == [1, 4]


def test_no_groups_left_stops_the_run_with_the_reason():
    everything = {i: set(range(99)) for i in range(9)}
    with pytest.raises(TrainingError, match=r"step 4: .* 2 episodes .* 16 attempts .*died"):
        run(everything)


def test_equal_rewards_are_the_reason_if_a_group_was_whole():
    """A few failed episodes are not why dynamic sampling finds nothing."""
    engine, environment = Engine(), Failing({6: set(range(99))})
    how = {"step": 3, "seed": 5, "accept": lambda group: False}
    config = RolloutConfig(prompts_per_step=2, group_size=4)
    with pytest.raises(
        TrainingError, match=r"all 1 problems .* equal rewards \(1 groups dropped\)"
    ):
        asyncio.run(collect_rollouts(engine, environment, config, Sampling(1.0, 8), **how))


class Unsupported(Engine):
    """An engine whose answers to some seeds lack their support, and to others have a wrong one."""

    def __init__(self, lacking=(), wrong=()):
        super().__init__()
        self.lacking, self.wrong = set(lacking), set(wrong)

    async def generate(self, tokens, sampling, *, seed):
        done = await super().generate(tokens, sampling, seed=seed)
        kept = [1]
        if seed in self.lacking:
            kept = []
        elif seed in self.wrong:
            kept = [2, 3]
        return dataclasses.replace(done, support=SupportTrace.from_sets([kept]))


def seed_of(problem, member, attempt=0):
    return request_seed(5, problem, 3, member, attempt=attempt)


CUT = Sampling(1.0, 8, top_p=0.9, support=True)
DROP = {"sampling": {"top_p": 0.9, "missing_support": "drop"}}


def test_an_episode_that_a_tool_ends_is_not_counted_as_one_without_a_support():
    """Of problem 6 episode 0 lacks a support once and is played again, 1 lacks one twice, 2 lacks
    one and then its tool dies; of problem 7 the tools of episodes 1 and 3 die."""
    lacking = [seed_of(6, 0), seed_of(6, 1), seed_of(6, 1, 1), seed_of(6, 2)]
    dying = {(6, 2, 1), *((7, member, attempt) for member in (1, 3) for attempt in (0, 1))}
    engine = Unsupported(lacking)

    class Dying(Failing):
        async def episode(self, problem, sample, temperature):
            done = await super().episode(problem, sample, temperature)
            if engine.seeds[-1] in {seed_of(*each) for each in dying}:
                raise EpisodeError("tool died")
            return done

    groups, metrics = collect(engine, Dying({}), asks=CUT, **DROP)
    assert [len(g.samples) for g in groups] == [2, 2]
    assert metrics == {
        "rollout/episodes_failed": 9,
        "rollout/episodes_dropped": 4,
        "rollout/missing_supports": 4,
        "rollout/dropped_without_support": 2,
    }


def test_without_a_fault_the_counts_of_supports_are_there_only_where_they_are_asked_for():
    _, metrics = collect(Unsupported(), Failing({}), asks=CUT, **DROP)
    assert metrics == {"rollout/missing_supports": 0, "rollout/dropped_without_support": 0}
    _, metrics = collect(Engine(), Failing({}), **DROP)  # these requests ask for none
    assert metrics == {}


def test_a_missing_support_ends_a_run_that_does_not_drop_and_a_wrong_one_every_run():
    with pytest.raises(MissingSupportError):
        collect(Unsupported([seed_of(6, 0)]), Failing({}), asks=CUT)
    with pytest.raises(SupportError, match="not in their own support"):
        collect(Unsupported(wrong=[seed_of(6, 0)]), Failing({}), asks=CUT, **DROP)


def test_an_evaluation_beside_the_rollouts_takes_none_of_their_counts():
    """With rollout.max_staleness the next step's episodes are played while one is evaluated."""

    class Slow(Unsupported):
        async def generate(self, tokens, sampling, *, seed):
            done = await super().generate(tokens, sampling, seed=seed)
            if sampling.support and len(self.seeds) > 4:
                await evaluation_over.wait()
            return done

    async def both():
        rollouts = asyncio.ensure_future(
            collect_rollouts(engine, environment, config, CUT, step=3, seed=5)
        )
        while len(engine.seeds) < 8:
            await asyncio.sleep(0)
        scores = await evaluate(
            Engine(), environment, EvalConfig(problems=2, k=0), stop=(), max_tokens=1
        )
        evaluation_over.set()
        return scores, (await rollouts)[1]

    evaluation_over = asyncio.Event()
    engine, environment = Slow([seed_of(6, 0), seed_of(6, 1), seed_of(7, 3)]), Failing({})
    environment.held_out = lambda count: [environment.train_problem(i) for i in range(count)]
    config = RolloutConfig(prompts_per_step=2, group_size=4, **DROP)
    scores, metrics = asyncio.run(both())
    assert metrics["rollout/missing_supports"] == 3
    assert not any("support" in name for name in scores)


def forked(rewards: list[float], episodes: list[int]) -> Group:
    pairs = zip(group(rewards).samples, episodes, strict=True)
    return Group(0, tuple(dataclasses.replace(sample, episode=e) for sample, e in pairs))


def test_samples_of_one_episode_count_once_in_the_baseline():
    """Rewards 1 (twice: a forked history), 0, 0: the mean is 1/3, not 1/2, and the deviation is
    that of three episodes."""
    made = forked([1, 1, 0, 0], [0, 0, 1, 2])

    def outcomes(**settings):
        (found,) = compute_outcomes([made], ObjectiveConfig(**settings))
        return [sample.outcome for sample in found.samples]

    mean = outcomes(normalise="none")
    assert mean == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])
    assert outcomes() == pytest.approx([x / ((1 / 3) ** 0.5 + 1e-6) for x in mean])
    loo = outcomes(baseline="leave-one-out", normalise="none")
    assert loo == pytest.approx([1, 1, -0.5, -0.5])


def test_without_forks_episodes_change_nothing():
    reward, unit = torch.tensor([1.0, 0.0, 3.0, 3.0]).double(), torch.tensor([0, 0, 4, 4])
    config, episode = ObjectiveConfig(), torch.tensor([1, 0, 0, 1])
    plain = apply_group_baseline(reward, unit, config)
    assert torch.equal(plain, apply_group_baseline(reward, unit, config, episode=episode))


def test_a_batch_knows_its_episodes():
    groups = [forked([1, 1, 0], [0, 0, 2]), group([1, 0], problem_id=1)]
    batch = pack(compute_outcomes(groups, ObjectiveConfig()))
    assert batch.episode.tolist() == [0, 0, 2, 0, 1]
    assert batch.select([4, 2]).episode.tolist() == [1, 2]


def test_an_evaluation_plays_a_failed_episode_again_and_drops_none():
    metrics, seeds = evaluated(Failing({1: {0, 1}}))
    assert metrics["eval/greedy"] == 0.5  # problem 1 is the one with reward 1
    assert len(set(seeds)) == len(seeds) == 4
    with pytest.raises(TrainingError, match=r"problem 1 .* 3 times: tool died in episode 2"):
        evaluated(Failing({1: {0, 1, 2}}))


def test_an_evaluation_counts_all_of_a_forked_episode():
    """Two samples have one token each and one has three: 2 and 3 tokens an episode."""

    class Forking(Failing):
        async def episode(self, problem, sample, temperature):
            await sample([1, 2])
            forks = {0: group([0.0, 1.0]), 1: group([1.0], slots=(3,))}
            return forks[problem.id].samples

    metrics, _ = evaluated(Forking({}))
    assert metrics == {"eval/greedy": 1.0, "eval/response_length": 2.5}


def test_every_turn_gets_its_episodes_prompt_length():
    asked = []

    class Notes(Engine):
        async def generate(self, tokens, sampling, *, seed):
            asked.append((tokens, sampling.initial_prompt_len))
            return await super().generate(tokens, sampling, seed=seed)

    class Turns(Failing):
        async def episode(self, problem, sample, temperature):
            await sample([1, 2, problem.id])
            await sample([1, 2, problem.id, 3, 4])
            await sample([1, 2, 5])  # a history that was rewritten
            return group([0.0]).samples

    collect(Notes(), Turns({}), prompts_per_step=1, group_size=1)
    assert asked == [([1, 2, 3], 3), ([1, 2, 3, 3, 4], 3), ([1, 2, 5], 3)]


def test_unread_responses_of_a_grader_count_in_their_step_alone():
    class Counting(Failing):
        left = 0

        async def episode(self, problem, sample, temperature):
            self.left += 1
            return await super().episode(problem, sample, temperature)

        def take_metrics(self):
            taken, self.left = self.left, 0
            return {"rollout/grader_skipped": taken}

    environment = Counting({})
    for _ in range(2):
        _, metrics = collect(Engine(), environment)
        assert metrics["rollout/grader_skipped"] == 8


def test_rollouts_and_an_evaluation_at_one_time_count_apart():
    """What one of them does neither leaves nor enters the row of another."""

    class Counting(Failing):
        counts = Counts()

        async def episode(self, problem, sample, temperature):
            await asyncio.sleep(0)  # the others go on
            self.counts.here["episodes"] += 1
            return await super().episode(problem, sample, temperature)

        def held_out(self, count):
            return [self.train_problem(8 - number) for number in range(count)]

        def take_metrics(self):
            return dict(self.counts.take())

    environment, engine = Counting({}), Engine()
    config = RolloutConfig(prompts_per_step=2, group_size=4)

    async def all_at_once():
        return await asyncio.gather(
            *(
                collect_rollouts(engine, environment, config, PLAIN, step=step, seed=5)
                for step in range(2)
            ),
            evaluate(engine, environment, EvalConfig(problems=3, k=2), stop=(), max_tokens=1),
        )

    (_, one), (_, other), _ = asyncio.run(all_at_once())
    assert one == other == {"episodes": 8}
    assert environment.take_metrics() == {}
