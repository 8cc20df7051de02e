"""The check of the first weight sync passes for the embedded engine, and stops one whose sync
changes the weights."""

import asyncio

import pytest
import torch

from onepolicy.sync.push import checked_push, push_weights
from support.engine_runs import engine_of
from support.models import VOCAB, make


class FakeLearner:
    version = 5

    def __init__(self, model):
        self.model = model

    def named_weights(self, dtype=None):
        yield from self.model.state_dict().items()


def test_the_embedded_engine_passes_and_has_the_learners_version():
    model = make("qwen3_moe")
    engine = engine_of(make("qwen3_moe"))
    engine.model.load_state_dict(model.state_dict())
    asyncio.run(checked_push(FakeLearner(model), engine, vocab=VOCAB))
    assert engine.version == 5
    assert not engine._runner.batch.rows.length.any()  # nothing stays cached


def test_a_push_returns_the_bytes_of_one_engine():
    engines = [engine_of(make("qwen3_moe")), engine_of(make("qwen3_moe"))]
    learner = FakeLearner(make("qwen3_moe"))
    given = asyncio.run(push_weights(learner, *engines))
    assert given == 4 * sum(tensor.numel() for tensor in learner.model.state_dict().values())


@pytest.mark.parametrize(
    "change", [lambda t: t * 1.001, lambda t: t.flip(0), lambda t: t * float("nan")]
)
def test_sync_that_changes_the_experts_is_stopped(change):
    model = make("qwen3_moe")
    engine = engine_of(make("qwen3_moe"))
    engine.model.load_state_dict(model.state_dict())
    load = engine.load_weights

    async def damaging(weights, version):
        await load(weights, version)
        with torch.no_grad():
            down = engine.model.model.layers[0].mlp.experts.down_proj
            down.copy_(change(down))

    engine.load_weights = damaging
    with pytest.raises(RuntimeError, match="HFEngine the weights it already holds moved"):
        asyncio.run(checked_push(FakeLearner(model), engine, vocab=VOCAB))
