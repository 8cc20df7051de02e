"""Weights to a vLLM server on another GPU than the trainer's, by hand. On GPU 1, as docs/engines.md
shows:

    onepolicy engine serve FOLDER --port 8000

Then, with GPU 0 visible:

    export ONEPOLICY_VLLM_URL=http://127.0.0.1:8000 ONEPOLICY_MODEL=FOLDER
    pytest -m gpu tests/e2e/rollout/vllm/test_sync_gpu.py

FOLDER: a MoE model with its tokenizer.
"""

import asyncio
import os

import pytest
import torch

from onepolicy.build.engines import build_engine
from onepolicy.config import ModelConfig, VLLMServerConfig
from onepolicy.models.load import load_model
from onepolicy.rollout.spec import EngineSpec
from onepolicy.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.timeout(3600)]
CUDA = torch.device("cuda")


def answers_of(way, weights, version):
    """Return greedy log-probabilities after a sync of these weights in this way."""
    config = VLLMServerConfig(url=os.environ["ONEPOLICY_VLLM_URL"], sync=way)
    model = ModelConfig(path=os.environ["ONEPOLICY_MODEL"])
    engine = build_engine(EngineSpec(model, config, CUDA, 64))

    async def ask():
        await engine.load_weights(weights, version)
        return await engine.generate([5, 6, 7, 8], Sampling(0.0, 32), seed=0)

    done = asyncio.run(ask())
    assert set(done.version.tolist()) == {version}
    return done.token_ids, done.logp


@pytest.mark.parametrize("way", ["nccl", "gloo"])
def test_a_broadcast_brings_the_same_weights_as_files(way):
    model = load_model(ModelConfig(path=os.environ["ONEPOLICY_MODEL"]), torch.bfloat16, CUDA)
    own = answers_of("disk", model.state_dict().items(), 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.05
    other = answers_of("disk", model.state_dict().items(), 2)
    assert not torch.equal(own[1], other[1])
    answers_of("disk", ((name, tensor / 1.05) for name, tensor in model.state_dict().items()), 3)
    sent = answers_of(way, model.state_dict().items(), 4)
    assert torch.equal(sent[0], other[0])
    torch.testing.assert_close(sent[1], other[1], atol=0.02, rtol=0)
