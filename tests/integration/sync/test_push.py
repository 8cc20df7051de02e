"""The check of the first weight sync passes for the embedded engine, and stops one whose sync
changes the weights."""

import asyncio

import pytest
import torch

from onepolicy.sync.canary import canary_prompts
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.types import Sampling
from support.engine_runs import engine_of, run
from support.fake_learner import FakeLearner
from support.models import VOCAB, make


def test_the_embedded_engine_passes_and_has_the_learners_version():
    model = make("qwen3_moe")
    engine = engine_of(make("qwen3_moe"))
    engine.model.load_state_dict(model.state_dict())
    asyncio.run(checked_push(FakeLearner(model), engine, vocab=VOCAB))
    assert engine.version == 5
    prompt = canary_prompts(VOCAB, engine.caps.max_len, 4)[-1]
    (done,) = run(engine, [(prompt, Sampling(1.0, 2), 0)])
    assert done.routing.spans[0].source == "prefill"  # nothing stays cached


def test_a_push_returns_the_bytes_of_one_engine():
    engines = [engine_of(make("qwen3_moe")), engine_of(make("qwen3_moe"))]
    learner = FakeLearner(make("qwen3_moe"))
    given = asyncio.run(push_weights(learner, *engines))
    assert given == 4 * sum(tensor.numel() for tensor in learner.model.state_dict().values())


def test_sync_that_changes_the_experts_is_stopped(subtests):
    model, engine = make("qwen3_moe"), engine_of(make("qwen3_moe"))
    load = engine.load_weights

    async def damaging(weights, version):
        await load(weights, version)
        with torch.no_grad():
            down = engine.model.model.layers[0].mlp.experts.down_proj
            down.copy_(change(down))

    engine.load_weights = damaging
    for change in (lambda t: t * 1.001, lambda t: t.flip(0), lambda t: t * float("nan")):
        asyncio.run(load(model.state_dict().items(), 5))
        wrong = pytest.raises(RuntimeError, match="HFEngine the weights it already holds moved")
        with subtests.test(change=change), wrong:
            asyncio.run(checked_push(FakeLearner(model), engine, vocab=VOCAB))
