"""Recurrent hybrids behind SGLang 0.5.23's contract, in a server of transformers' own operators.
SGLang itself was not run with one."""

import pytest
import torch

from onepolicy.config import ModelConfig
from onepolicy.models.load import load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.routers import bind_routers
from onepolicy.train.forward import forward
from onepolicy.types import Sampling
from support.engine_runs import prompts
from support.fake_sglang_model import ModelSGLang
from support.invariant_models import batch_of
from support.recurrent_models import hybrid
from support.sglang_engines import open_engine, play

CPU = torch.device("cpu")
EVERY_LAYER = "qwen3_5_moe_text"  # has experts
SOME_LAYERS = "nemotron_h"  # have experts, and these no mixer


@pytest.mark.parametrize("family", [EVERY_LAYER, SOME_LAYERS])
def test_routes_of_a_hybrid_are_read_and_replayed(family, tmp_path):
    hybrid(family).save_pretrained(tmp_path)
    trained = load_model(ModelConfig(path=str(tmp_path)), torch.float32, CPU)
    prepare_for_training(trained, CPU)
    routers = bind_routers(trained)
    rules = RouteSpec(routers.layers, routers.num_experts, routers.top_k, "error")
    requests = [(prompt, Sampling(1.0, 9), i) for i, prompt in enumerate(prompts(4))]
    with ModelSGLang(str(tmp_path)) as fake:
        done = play(open_engine(fake, routes=rules), *((p, s) for p, s, _ in requests))
    batch = batch_of(requests, done)
    with torch.no_grad():
        with routers.record() as tape:
            forward(trained, batch)
        # other experts than the trainer's own: what was read is what is replayed
        swapped = batch.routing.ids.flip(1)
        with routers.replay(batch.routing):
            logp = forward(trained, batch).logp
        batch.routing.ids.copy_(swapped)
        with routers.replay(batch.routing, check=False):
            other = forward(trained, batch).logp
    trainable = batch.trainable
    expected = batch.logp_rollout[trainable]
    assert torch.equal(tape.trace().ids.sort(-1).values, swapped.flip(1).sort(-1).values)
    torch.testing.assert_close(logp[trainable], expected, atol=2e-5, rtol=0)
    assert (other[trainable] - expected).abs().max() > 1e-3
