"""Asynchronous rollouts: the start of each step's episodes, the waits, errors, and the settings."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from onepolicy.build import learner
from onepolicy.config import TrainingError, UsageError, resolve
from onepolicy.run import async_rollouts
from onepolicy.run.async_rollouts import RolloutPrefetcher, staleness_metrics
from onepolicy.run.step import Rollouts, StepRunner
from onepolicy.types import Group, Sample


def sample(*version):
    """Return a sample of one prompt token, then one trainable token of each version; -1:
    observed."""
    versions = torch.tensor(version, dtype=torch.int32)
    mine = versions >= 0
    turn = torch.where(mine, 0, -1).int()
    logp = torch.where(mine, -1.0, float("nan"))
    tokens = torch.zeros(len(version) + 1, dtype=torch.int32)
    return Sample(tokens, mine, logp, versions, turn, 1.0, 0.0, "stop")


class Play:
    """A stand-in for `sample`: the test ends a step's episodes."""

    def __init__(self, monkeypatch):
        self.began, self.gates, self.version = [], {}, None
        monkeypatch.setattr(async_rollouts, "sample_rollouts", self)

    async def __call__(self, parts, step, advance):
        self.began.append(step)
        self.gates[step] = asyncio.Event()
        await self.gates[step].wait()
        advance()
        played = sample(step if self.version is None else self.version)
        return Rollouts([Group(step, (played,))], {})


def runner(max_staleness, steps=9):
    """Return a runner of steps whose engine is in this process, without hooks."""
    config = SimpleNamespace(
        rollout=SimpleNamespace(max_staleness=max_staleness),
        steps=steps,
        numerics="fast",
        replay=None,
    )
    learner = SimpleNamespace(fingerprint="", scorer=None)
    return StepRunner(SimpleNamespace(config=config, engine=None, learner=learner), [])


async def schedule(prefetcher, step):
    prefetcher.schedule(step)
    await settle()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def test_steps_begin_as_far_ahead_as_allowed(monkeypatch):
    async def main():
        play = Play(monkeypatch)
        async with RolloutPrefetcher(runner(2, steps=7), first=3) as prefetcher:
            assert prefetcher.idle
            for _ in range(2):
                await schedule(prefetcher, 3)
                assert (play.began, prefetcher.idle) == ([3, 4, 5], False)
            for step in (4, 3, 5):  # the later one ends first; it waits
                play.gates[step].set()
            ended = []
            assert (await prefetcher.get(3, lambda: ended.append(3))).groups[0].problem_id == 3
            assert ended == [3]
            for step in (4, 5):
                await schedule(prefetcher, step)
                assert play.began == [3, 4, 5, 6]
            assert [(await prefetcher.get(step)).groups[0].problem_id for step in (4, 5)] == [4, 5]

    asyncio.run(main())


def test_staleness_zero_begins_one_step_at_a_time(monkeypatch):
    async def main():
        play = Play(monkeypatch)
        async with RolloutPrefetcher(runner(0), first=0) as prefetcher:
            for step in range(3):
                await schedule(prefetcher, step)
                assert play.began == list(range(step + 1))
                play.gates[step].set()
                await prefetcher.get(step)
                await settle()
                assert prefetcher.idle

    asyncio.run(main())


def test_a_token_that_is_too_old_is_never_trained_on(monkeypatch):
    """The engine takes no updates: version 0 for ever."""

    async def main():
        play = Play(monkeypatch)
        play.version = 0
        async with RolloutPrefetcher(runner(1), first=0) as prefetcher:
            for step in range(3):
                await schedule(prefetcher, step)
                play.gates[step].set()
                await prefetcher.get(step)

    with pytest.raises(TrainingError, match=r"version 0 .* token of step 3, .* of version 2"):
        asyncio.run(main())


def test_an_error_is_raised_at_its_own_step_and_the_rest_is_ended(monkeypatch):
    async def broken(parts, step, advance):
        if step == 1:
            raise UsageError("routes of problem 7")
        if step == 2:
            await asyncio.sleep(3600)
        return Rollouts([Group(step, (sample(step),))], {})

    async def main():
        monkeypatch.setattr(async_rollouts, "sample_rollouts", broken)
        async with RolloutPrefetcher(runner(2), first=0) as prefetcher:
            prefetcher.schedule(0)
            await prefetcher.get(0)
            await prefetcher.get(1)

    with pytest.raises(UsageError, match="routes of problem 7"):
        asyncio.run(asyncio.wait_for(main(), timeout=60))


def test_an_interrupt_during_an_update_explains_the_wait(monkeypatch, caplog):
    learning, ended = threading.Event(), threading.Event()

    def learn(*_, **__):
        learning.set()
        ended.wait(60)

    async def main():
        play = Play(monkeypatch)
        monkeypatch.setattr(async_rollouts, "train_on_rollouts", learn)
        async with RolloutPrefetcher(runner(1), first=0) as prefetcher:
            step = asyncio.create_task(prefetcher.run_step(0))
            await settle()
            play.gates[0].set()
            await asyncio.to_thread(learning.wait, 60)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            ended.set()

    asyncio.run(main())
    assert caplog.messages == ["stopping once the update in progress has ended"]


def test_staleness_by_hand():
    groups = [Group(0, (sample(-1, 5, 5, 4), sample(5, 5))), Group(1, (sample(3), sample(5, 5)))]
    expected = {"mean": 3 / 8, "max": 2, "tokens": 2 / 8, "spanning": 1 / 4}
    expected = {f"staleness/{name}": value for name, value in expected.items()}
    assert staleness_metrics(groups, 5) == pytest.approx(expected)


BASE = {"out": "x", "steps": 4, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


STALE = "rollout.max_staleness"
PRESETS = [
    ([f"{STALE}=1"], "tis"),
    ([f"{STALE}=1", "replay.mode=off"], "tis"),
    ([f"{STALE}=1", "correction.preset=icepop"], "icepop"),
    ([f"{STALE}=1", "correction.preset=recompute"], "recompute"),
    ([f"{STALE}=0"], "recompute"),
    ([f"{STALE}=off"], "recompute"),
    ([], "recompute"),
]


def test_the_decoupled_objective_is_the_default_with_old_tokens(subtests):
    for overrides, preset in PRESETS:
        with subtests.test(overrides=overrides):
            config = resolve(BASE, overrides)
            assert (config.correction.preset, config.correction.ratio) == (preset, "old/rollout")
            assert config.scores_old  # the proximal policy is the trainer's now


def test_other_values_are_refused(subtests):
    for value in ("1.0", "'2'", "true", "-1", "on"):  # the correction would not follow 1.0
        case, words = subtests.test(value=value), rf"\A{STALE}: Input should be .*\Z"
        with case, pytest.raises(UsageError, match=words):
            resolve(BASE, [f"{STALE}={value}"])


THREADS = [
    ([], []),
    ([f"{STALE}=2"], [3]),
    ([f"{STALE}=2", "train.threads=5"], [5]),
    ([f"{STALE}=2", "rollout.engine.kind=vllm-server"], []),
    ([f"{STALE}=2", "cluster.kind=ray"], []),
    ([f"{STALE}=0"], []),
]


def test_an_engine_and_a_trainer_in_parallel_share_the_cores(monkeypatch, subtests):
    chosen = []
    monkeypatch.setattr(learner.os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(learner.os, "cpu_count", lambda: 64)  # of the machine, not of the job
    monkeypatch.setattr(learner.torch, "set_num_threads", chosen.append)
    for settings, threads in THREADS:
        chosen.clear()
        with subtests.test(settings=settings):
            learner.set_num_threads(resolve(BASE, settings))
            assert chosen == threads
