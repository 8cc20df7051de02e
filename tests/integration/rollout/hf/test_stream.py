"""An engine with a stream of its own: the order of its work and of an update, and what it samples.

No GPU: the streams are written down, and the engine computes on the CPU.
"""

import asyncio
from contextlib import contextmanager

import pytest
import torch

from onepolicy.config import HFEngineConfig, ModelConfig
from onepolicy.rollout.hf import engine as module
from onepolicy.rollout.hf.prepare import EngineStream
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Sampling
from support.engine_runs import build, prompts, run
from support.models import make

LEARNERS = "the learner's"
WAITS = []
"""(waiting stream, the one it waits for) in the order of the calls."""


class Stream:
    """A CUDA stream that notes what waits for what."""

    def __init__(self, device=None, priority=0):
        self.name = "the engine's" if device is not None else LEARNERS

    def wait_stream(self, other):
        WAITS.append((self.name, other.name))


@pytest.fixture
def streams(monkeypatch):
    learners, entered = Stream(), []

    @contextmanager
    def enter(queued):
        entered.append(queued.name)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: learners)
    WAITS.clear()
    return entered


def test_an_update_comes_between_two_steps(streams):
    own = EngineStream(torch.device("cuda", 0))
    assert WAITS == [("the engine's", LEARNERS)]  # the weights are there
    WAITS.clear()
    with own.update():
        assert WAITS == [(LEARNERS, "the engine's")]  # no step reads half of the weights
    assert WAITS[1:] == [("the engine's", LEARNERS)]


def test_steps_are_on_the_stream_and_sample_the_same(streams):
    requests = [(p, Sampling(1.0, 6), i) for i, p in enumerate(prompts(5))]
    expected = run(build("qwen3_moe"), requests)
    engine = build("qwen3_moe")
    engine.use_stream(EngineStream(torch.device("cuda", 0)))
    found = run(engine, requests)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.logp, theirs.logp)
    assert set(streams[::2]) == {"the engine's"}  # each step enters it and leaves it
    assert set(streams[1::2]) == {None}
    WAITS.clear()
    asyncio.run(engine.load_weights(engine.model.state_dict().items(), 1))
    assert WAITS == [(LEARNERS, "the engine's"), ("the engine's", LEARNERS)]


@pytest.mark.parametrize("beside_learner", [False, True])
def test_only_a_gpu_has_streams(beside_learner, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "EngineStream", lambda _: pytest.fail("a stream on a CPU"))
    make("qwen3_moe").save_pretrained(tmp_path)
    config = HFEngineConfig(dtype="float32", max_num_seqs=4)
    model, cpu = ModelConfig(path=str(tmp_path)), torch.device("cpu")
    spec = EngineSpec(model, config, cpu, 64, beside_learner=beside_learner)
    requests = [(p, Sampling(1.0, 3), i) for i, p in enumerate(prompts(2))]
    assert len(run(module.build(spec), requests)) == 2
