"""`rollout.engine.lm_head = float32` in vLLM: it takes effect, brings vLLM nearer to the trainer,
and stays after a sync."""

import asyncio

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from onepolicy.config import ModelConfig, VLLMEngineConfig
from onepolicy.models.load import load_model, read_config
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.sync.push import checked_push
from onepolicy.types import Sampling
from support.vllm_engines import VOCAB, FakeLearner, picked, play, prompts

pytestmark = pytest.mark.vllm
SIZE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
ENGINE = {"dtype": "bfloat16", "max_num_seqs": 16, "kv_cache_gib": 0.125, "block_size": 32}


def test_float32_head_comes_nearer_to_the_trainer(tmp_path, caplog):
    """The model has one dense layer, weights that bfloat16 represents, and logits of several nats,
    so only the logits are rounded."""
    torch.manual_seed(0)
    own = {"initializer_range": 0.05, "tie_word_embeddings": False}
    made = Qwen3ForCausalLM(Qwen3Config(**SIZE, vocab_size=VOCAB, **own))
    made.lm_head.weight.data *= 8
    made.bfloat16().save_pretrained(tmp_path)
    source = ModelConfig(path=str(tmp_path))
    model = load_model(source, torch.float32, torch.device("cpu"))
    requests = [(prompt, Sampling(1.0, 60), i) for i, prompt in enumerate(prompts(16))]
    gaps, values = {}, {}
    caplog.set_level("INFO", "onepolicy")
    for lm_head in ("same", "float32"):
        settings, hf = VLLMEngineConfig(lm_head=lm_head, **ENGINE), read_config(source)
        engine = VLLMEngine(source, hf, settings, route_spec=None, max_len=96, cpu=True)
        done = play(engine, requests)
        off = []
        for (prompt, _, _), each in zip(requests, done, strict=True):
            path = torch.tensor([[*prompt, *each.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(input_ids=path, use_cache=False).logits[0, len(prompt) - 1 : -1]
            off.append(each.logp - picked(logits, each.token_ids))
        gaps[lm_head], values[lm_head] = float(torch.cat(off).square().mean()), done[0].logp[0]
        asyncio.run(checked_push(FakeLearner(model), engine, vocab=VOCAB))
    assert "starting vLLM" in caplog.text
    assert "warmed up in" in caplog.text
    assert values["same"] != values["float32"]
    assert gaps["float32"] < 0.93 * gaps["same"], gaps
