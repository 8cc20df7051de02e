"""What is reckoned to fit on a GPU does: the engine's whole cache beside a learner that updates."""

import asyncio

import pytest
import torch
from gpu.harness import Bench
from gpu.lease import Results
from gpu.models import dense, make
from gpu.shapes import QWEN3_06B
from gpu.step import Ours
from transformers import Qwen3Config

from onepolicy.build.gpu_defaults import settle_gpu_settings
from onepolicy.config import UsageError, resolve
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling
from support.gpu import CUDA

pytestmark = CUDA
NEVER = 10**6  # a stop token that no row samples


@pytest.fixture
def settings(tmp_path):
    """Return settled(*overrides): the settings of a run of Qwen3-0.6B on this GPU."""
    Qwen3Config(**QWEN3_06B, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    tree = {"out": "unused", "steps": 1, "task": {"kind": "chain"}}
    tree |= {"model": {"path": str(tmp_path)}, "train": {"device": "cuda"}}

    def settled(*overrides):
        return settle_gpu_settings(resolve(tree, list(overrides)), None, print)

    return settled


def test_the_cache_that_fits_holds_its_tokens_beside_an_update(settings, tmp_path):
    config = settings()
    assert config.model.dtype == "bfloat16"
    engine = config.rollout.engine
    assert engine.max_len > 1000
    bench = Bench("room", torch.device("cuda"), Results(tmp_path), tiny=False)
    learner = Ours(bench, [512] * 32, 256, "bfloat16", "off")
    model = make(dense(bench), bench, torch.bfloat16)
    sampler = HFEngine(model, engine, return_routes=False, max_len=engine.max_len)

    async def sample():
        sampling = Sampling(1.0, 3, stop=(NEVER,))
        rows = [list(range(2, 34))] * engine.max_num_seqs
        return await asyncio.gather(
            *(sampler.generate(row, sampling, seed=i) for i, row in enumerate(rows))
        )

    for completion in asyncio.run(sample()):
        assert len(completion.token_ids) == 3
    learner.update()
    torch.cuda.synchronize()


def test_what_does_not_fit_is_refused_before_anything_is_loaded(settings):
    with pytest.raises(UsageError, match=r"rollout.engine.max_len: 40960 tokens .* take 30"):
        settings("rollout.engine.max_len=40960")
    assert torch.cuda.memory_allocated() < 1e9
