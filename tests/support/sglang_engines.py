"""Models and engines for the tests against fake_sglang.py, and the results that its server must
have."""

import asyncio

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import ModelConfig, SGLangConfig
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.rollout.remote.engine import RemoteEngine
from support.fake_sglang import EXPERTS, LAYERS, TOP_K, VOCAB
from support.waiting import LIMIT_S

RULES = RouteSpec((1, 2), EXPERTS, TOP_K, "error")
PROMPT = [5, 9, 3, 20]


def make_models(folder):
    """Make two models of one shape, each with its folder."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16},
                **{"num_hidden_layers": LAYERS, "mlp_only_layers": [0], "num_experts": EXPERTS},
                **{"num_experts_per_tok": TOP_K, "moe_intermediate_size": 8},
                **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
                **{"max_position_embeddings": 256, "initializer_range": 0.5, "eos_token_id": 1},
            )
        )
        path = folder / f"model{seed}"
        model.save_pretrained(path)
        made.append((model, str(path)))
    return made


def open_engine(fake, routes=RULES, connect=True, **settings):
    model = ModelConfig(path=fake.folder)
    usual = {"url": fake.url, "dtype": "float32", "retries": 2, "timeout_s": LIMIT_S}
    config = SGLangConfig(**usual | settings)
    engine = RemoteEngine(model, read_config(model), config, route_spec=routes, max_len=200)
    if connect:
        asyncio.run(engine.connect())
    return engine


def play(engine, *requests):
    """Run all requests at once: (prompt, sampling)."""

    async def together():
        asked = (engine.generate(p, s, seed=i) for i, (p, s) in enumerate(requests))
        return await asyncio.gather(*asked)

    return asyncio.run(together())


def bigram(folder, path, temperature=1.0):
    """Return log-probabilities [len(path), V] of the token after each of the path's tokens."""
    tensors = load_file(f"{folder}/model.safetensors")
    logits = tensors["model.embed_tokens.weight"][path] @ tensors["lm_head.weight"].T
    return torch.log_softmax(logits / temperature, -1)


def rows(folder, path):
    """Return the routes [len(path), 2, 2] of a path under one model, MoE layers only."""
    shift = int(load_file(f"{folder}/model.safetensors")["lm_head.weight"].sum() * 1000)
    return [
        [[(t + layer + shift) % EXPERTS, (t + layer + shift + 3) % EXPERTS] for layer in (1, 2)]
        for t in path
    ]


def spans(done):
    return [(span.source, span.start, span.length, span.version) for span in done.routing.spans]
