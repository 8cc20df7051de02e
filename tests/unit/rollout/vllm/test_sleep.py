"""vLLM beside the learner sleeps while that works, and wakes by itself. No vLLM is started here."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepolicy.interfaces import SleepingSampler
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.run import step


class Log:
    """vLLM's LLMEngine and the runner of its requests, as a list of calls."""

    def __init__(self):
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self):
        self.calls.append("wake")

    def clear_cache(self, purpose):
        self.calls.append(f"clear for {purpose}")

    def collective_rpc(self, work, args):
        self.calls.append("load")


class Names:
    def stream_to_checkpoint(self, weights):
        return weights


@pytest.fixture
def asleep():
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._devices = 1
    engine.llm = engine._runner = Log()
    engine._names, engine._sleeps, engine._asleep, engine.version = Names(), True, False, 0
    engine.sleep()
    return engine


def test_a_step_sleeps_between_its_rollouts_and_its_update(monkeypatch, asleep):
    asyncio.run(asleep.reset_cache())
    log = asleep.llm.calls
    log.clear()

    async def rollouts(*_):
        log.append("rollouts")

    async def push(*_):
        log.append("push")
        return {}

    def update(*_):
        log.append("update")
        return SimpleNamespace(metrics={})

    monkeypatch.setattr(step, "sample_rollouts", rollouts)
    monkeypatch.setattr(step, "train_on_rollouts", update)
    monkeypatch.setattr(step, "push_and_check", push)
    monkeypatch.setattr(step, "add_timings", lambda *_: None)
    asyncio.run(step.StepRunner(SimpleNamespace(engine=asleep), []).rl_step(0))
    assert log == ["rollouts", "clear for sleep", "sleep 1", "update", "push"]


def test_it_wakes_for_new_weights(asleep):
    assert isinstance(asleep, SleepingSampler)
    asleep.sleep()  # once is enough
    assert asleep.llm.calls == ["clear for sleep", "sleep 1"]
    asyncio.run(asleep.load_weights([], 1))
    cleared = "clear for load_weights"
    assert asleep.llm.calls[2:] == ["wake", cleared, "load", cleared]


def test_it_wakes_for_a_reset_and_with_a_device_of_its_own_never_sleeps(asleep):
    asyncio.run(asleep.reset_cache())
    assert asleep.llm.calls[2:] == ["wake", "clear for reset_cache"]
    asleep._sleeps = False
    asleep.sleep()
    assert asleep.llm.calls[4:] == []


def test_the_installed_vllm_has_the_calls():
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(found.origin).parent / "v1" / "engine" / "llm_engine.py"
    text = source.read_text()
    assert "def sleep(self, level: int" in text
    assert "def wake_up(self" in text
    arguments = (source.parents[2] / "engine" / "arg_utils.py").read_text()
    for name in ("enable_sleep_mode", "gpu_memory_utilization", "kv_cache_memory_bytes"):
        assert f"    {name}: " in arguments
