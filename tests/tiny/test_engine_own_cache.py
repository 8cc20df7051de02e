"""Families with recurrent state run on the model's own cache, with the same guarantees but no sharing."""

import pytest
import torch
from engine_support import check_against_stock, engine_of, prompts, run
from transformers import AutoModelForCausalLM, Lfm2MoeConfig, Qwen3NextConfig

from onepolicy.rollout.hf.own_cache import OwnCacheBatch
from onepolicy.types import Sampling

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 32,
}
CONFIGS = {
    "lfm2_moe": Lfm2MoeConfig(
        **BASE,
        num_hidden_layers=3,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "qwen3_next": Qwen3NextConfig(**BASE, **LINEAR),
}


def make(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logp_and_routes_are_the_stock_models(name):
    engine = engine_of(make(name), slots=3)
    assert isinstance(engine.batch, OwnCacheBatch)
    paths = prompts(3, 9, 10) + prompts(3, 5, 6, seed=1) + prompts(3, 9, 10, seed=2)
    requests = [
        (p, Sampling(0.7 if i % 2 else 1.0, 2 + i, top_logprobs=i % 3), i)
        for i, p in enumerate(paths)
    ]
    done = run(engine, requests)
    assert [len(c.token_ids) for c in done] == [s.max_tokens for _, s, _ in requests]
    check_against_stock(make(name), requests, done)
    assert [span.source for span in done[0].routing.spans] == ["prefill", "decode"]


def test_seed_and_stop():
    (path,) = prompts(1, 9, 10)
    long, other = run(
        engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 12), 4), (path, Sampling(1.0, 12), 5)]
    )
    stop = int(long.token_ids[3])
    first = long.token_ids.tolist().index(stop)
    (short,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 12, stop=(stop,)), 4)])
    assert short.finish == "stop"
    assert short.token_ids.tolist() == long.token_ids.tolist()[: first + 1]
    assert other.token_ids.tolist() != long.token_ids.tolist()


def test_only_the_routes_asked_for_are_returned():
    (path,) = prompts(1, 9, 10)
    (whole,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 4), 4)])
    (part,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 4, routes_from=8), 4)])
    assert (part.first_slot, part.routing.spans) == (8, whole.routing.rows(8, 12).spans)
    assert torch.equal(part.routing.ids, whole.routing.ids[8:])
