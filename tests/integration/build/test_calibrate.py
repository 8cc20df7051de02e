"""Scales of static activations are the policy's, every copy has them, and LoRA runs log them."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch

from onepolicy.build import calibrate as calibrating
from onepolicy.build.calibrate import CALIBRATION_EPISODES, calibrate, play_episodes, scales_of
from onepolicy.config import (
    HFEngineConfig,
    Int8,
    ModelConfig,
    RolloutConfig,
    TrainingError,
    resolve,
)
from onepolicy.interfaces import EpisodeError, Problem
from onepolicy.models.quant.quantise import use_scales
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.run import adapter_check
from onepolicy.run.adapter_check import AdapterCheck, holding_policy
from onepolicy.run.step import StepResult, StepTimer, add_timings
from support.adapter_learner import Learner
from support.learner_steps import BASE
from support.models import make


class Asking:
    """An environment whose episodes are one request. Those in `failing` fail before it."""

    def __init__(self, failing=(), error=EpisodeError):
        self.failing, self.error, self.played = set(failing), error, []

    def train_problem(self, index):
        return Problem(index, "", "")

    async def episode(self, problem, sample, temperature):
        if problem.id in self.failing:
            raise self.error(f"{problem.id} died")
        await sample([2, 3, 4], max_tokens=2)
        self.played.append(problem.id)
        return ()


def static_engine():
    config = HFEngineConfig(dtype="float32", max_num_seqs=8)
    quant = Int8(activations="static")
    return HFEngine(make("qwen3_moe"), config, return_routes=False, max_len=64, quant=quant)


@pytest.fixture(scope="module")
def engine():
    return static_engine()


def test_a_failed_episode_is_left_out_and_all_of_them_are_an_error(engine):
    config, some = resolve(BASE), Asking({0, 3})
    asyncio.run(play_episodes(config, engine, some, ()))
    assert len(some.played) == CALIBRATION_EPISODES - 2
    everything = Asking(range(CALIBRATION_EPISODES))
    with pytest.raises(TrainingError, match=r"all 32 episodes of the calibration .*31 died"):
        asyncio.run(play_episodes(config, engine, everything, ()))
    with pytest.raises(ZeroDivisionError):
        asyncio.run(play_episodes(config, engine, Asking({0}, ZeroDivisionError), ()))


def test_scales_are_of_the_policy_and_of_every_copy(engine, tmp_path, monkeypatch):
    given, held = [], []

    @asynccontextmanager
    async def policy():
        held.append("policy")
        yield
        held.append("base")

    monkeypatch.setattr(calibrating, "CALIBRATION_EPISODES", 2)
    copies = SimpleNamespace(use_scales=given.append)
    for _ in range(2):  # the second time they are stored
        setting = calibrate(
            resolve(BASE), engine, Asking(), (), tmp_path, reprefill=copies, policy=policy()
        )
        asyncio.run(setting)
    assert held == ["policy", "base"]
    stored = json.loads((tmp_path / "calibration.json").read_text())
    assert given[0] == given[1] == pytest.approx(stored)
    assert scales_of(engine) == given[1]
    make("qwen3_moe").save_pretrained(tmp_path / "model")
    rollout = RolloutConfig.model_validate({"quant": {"format": "int8", "activations": "static"}})
    path = ModelConfig(path=str(tmp_path / "model"))
    copy = load_engine_copy(path, rollout, torch.device("cpu"))
    use_scales(copy, scales_of(engine))
    assert copy.quantised.scales() == given[1]


@pytest.mark.parametrize("base", ["none", "nf4"])
def test_an_engine_holds_the_policy_and_then_what_it_was_built_with(base, monkeypatch):
    learner, loaded = Learner(torch.nn.Linear(2, 2)), []

    class Engine:
        caps, version, adapter = SimpleNamespace(takes_adapter=False, weights_dtype=None), 0, None

        async def load_weights(self, weights, version):
            loaded.append(dict(weights)["weight"])

        async def reset_cache(self): ...

    built = torch.nn.Linear(2, 2)
    monkeypatch.setattr(adapter_check, "load_model", lambda *_: built)
    learner.scorer = SimpleNamespace(device=torch.device("cpu"))
    lora = SimpleNamespace(base=base)
    model = ModelConfig(path="unused")
    config = SimpleNamespace(train=SimpleNamespace(lora=lora), model=model)

    async def hold():
        async with holding_policy(SimpleNamespace(config=config, engine=Engine(), learner=learner)):
            assert torch.equal(loaded[-1], 2 * learner.model.weight)

    asyncio.run(hold())
    frozen = {"none": learner.model.weight, "nf4": built.weight}[base]
    assert torch.equal(loaded[-1], frozen)


class Counting(HFEngine):
    """An engine with statistics of its rollouts, until the check of an adapter resets them."""

    def __init__(self):
        self.counted = {"quant/clipped": 0.25}

    def take_metrics(self):
        taken, self.counted = self.counted, {"quant/clipped": 1.0}  # of the check's own requests
        return taken


def test_statistics_of_a_step_are_taken_before_the_adapter_is_checked():
    check = AdapterCheck.__new__(AdapterCheck)
    check.engine, check.settings = Counting(), SimpleNamespace(loss_every=0)
    check.learner = SimpleNamespace(updates=1, version=1)

    async def checked():
        return SimpleNamespace(certain=True, value=1.0), 0.5, 0.1

    check._check_push = checked
    result = StepResult([], None, metrics=asyncio.run(check.after_push()))
    assert result.metrics["quant/clipped"] == 0.25
    add_timings(SimpleNamespace(engine=check.engine), result, StepTimer())
    assert result.metrics["quant/clipped"] == 0.25
    assert result.metrics["adapter/delivered"] == 1
