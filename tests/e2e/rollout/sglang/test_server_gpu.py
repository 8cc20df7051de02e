"""SGLang on real hardware, by hand: start a server as docs/engines.md shows, then

    export ONEPOLICY_SGLANG_URL=http://127.0.0.1:30000 ONEPOLICY_SGLANG_MODEL=FOLDER
    pytest -m gpu tests/e2e/rollout/sglang/test_server_gpu.py

FOLDER is the MoE model that the server was started with. It fits on the trainer's GPU, which is not
the server's.
"""

import asyncio
import os

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import ModelConfig, SGLangConfig
from onepolicy.models.load import load_model, read_config
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.types import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(3600)]
URL, MODEL = os.environ.get("ONEPOLICY_SGLANG_URL"), os.environ.get("ONEPOLICY_SGLANG_MODEL")


@pytest.fixture(autouse=True)
def needed():
    assert URL, "set ONEPOLICY_SGLANG_URL and ONEPOLICY_SGLANG_MODEL"
    assert MODEL, "set ONEPOLICY_SGLANG_URL and ONEPOLICY_SGLANG_MODEL"


def open_engine(**settings):
    model = ModelConfig(path=MODEL)
    engine = RemoteEngine(
        model, read_config(model), SGLangConfig(url=URL, **settings), route_spec=None, max_len=512
    )
    asyncio.run(engine.connect())
    return engine


def test_engine_check_passes():
    assert (
        main(["engine", "check", MODEL, "--engine", "sglang", "--url", URL, "train.device=cuda"])
        == 0
    )


@pytest.mark.parametrize("way", ["nccl", "gloo", "disk"])
def test_its_own_weights_move_no_log_probability(way):
    engine = open_engine(sync=way)
    weights = load_model(ModelConfig(path=MODEL), torch.bfloat16, torch.device("cuda")).state_dict()
    before = asyncio.run(engine.generate([5, 6, 7, 8], Sampling(0.0, 16), seed=0))
    asyncio.run(engine.load_weights(weights.items(), 1))
    after = asyncio.run(engine.generate([5, 6, 7, 8], Sampling(0.0, 16), seed=0))
    assert after.version.tolist() == [1] * 16
    torch.testing.assert_close(after.logp, before.logp, atol=0.05, rtol=0)


def test_seeds_of_a_deterministic_server():
    """With --enable-deterministic-inference the same seed draws the same tokens, and another seed
    draws others."""
    engine = open_engine()
    assert engine.caps.seeded, "start the server with --enable-deterministic-inference"
    first, again, other = (
        asyncio.run(engine.generate([5, 6, 7, 8], Sampling(1.0, 64), seed=seed)).token_ids
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
