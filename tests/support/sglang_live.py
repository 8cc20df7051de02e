"""A SGLang server of the tests, an engine that talks to it, and the stock model's results for the
same tokens."""

import asyncio
import os
import socket
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from onepolicy.config import ModelConfig, SGLangConfig
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.remote.engine import RemoteEngine
from onepolicy.types import Sampling
from support.waiting import LIMIT_S, wait_until

RULES = RouteSpec((0, 1, 2), 16, 4, "error")
START_S = 800
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTERS = (
    *("--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", *ATTENTION),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
)
"""Arguments of a server that takes adapters. Its other kernels of adapters need a GPU."""


def start_module():
    spec = spec_from_file_location(
        "sglang_start", Path(__file__).parent / "sglang_server" / "start.py"
    )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers(url, process, log):
    assert process.poll() is None, log.read_text()[-4000:]
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{url}/model_info", timeout=LIMIT_S).status_code == 200


@contextmanager
def serving(folder, log, *extra):
    """Start a server with this model in float32 and yield its URL. extra: arguments of SGLang."""
    start = start_module()
    if not start.PYTHON.exists():
        assert "CI" not in os.environ, "make sglang was not run"
        pytest.skip(f"no {start.PYTHON}: run `make sglang`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = start.start(folder, port, *extra, dtype="float32", log=out)
    try:
        wait_until(lambda: answers(url, process, log), START_S, poll=1)
        yield url
    finally:
        start.stop(process)


def open_engine(server, folder, rules=RULES, **settings):
    config = SGLangConfig(url=server, dtype="float32", **settings)
    model = ModelConfig(path=str(folder))
    engine = RemoteEngine(model, read_config(model), config, route_spec=rules, max_len=500)
    asyncio.run(engine.connect())
    return engine


def recipe(folder, server, out):
    """Write a recipe of three short steps and return its path."""
    path = out / "recipe.toml"
    path.write_text(
        f"""
        out = "{out / "run"}"
        steps = 3
        model = {{ path = "{folder}" }}
        task = {{ kind = "chain", ops = 2 }}
        optim = {{ lr = 1e-3 }}
        eval = {{ every = 3, problems = 4, k = 1 }}
        log = {{ counterfactual_every = 1, tensorboard = false, report = false }}
        [rollout]
        prompts_per_step = 2
        group_size = 4
        sampling = {{ max_tokens = 20 }}
        engine = {{ kind = "sglang", url = "{server}", dtype = "float32" }}
        """
    )
    return str(path)


def checksums(server):
    (rank,) = httpx2.post(
        f"{server}/weights_checker", json={"action": "checksum"}, timeout=60
    ).json()["ranks"]
    return rank["checksums"]


def prompts(count, vocab=16):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 25, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def play(engine, requests):
    """Run all requests at once: (prompt, sampling)."""

    async def together():
        return await asyncio.gather(
            *(engine.generate(p, s, seed=i) for i, (p, s) in enumerate(requests))
        )

    return asyncio.run(together())


def greedy(engine):
    asyncio.run(engine.reset_cache())
    return [
        done.logp for p in prompts(4) for done in play(engine, [(p, Sampling(0.0, 12))])
    ]  # one at a time


@torch.no_grad()
def stock(model, prompt, done, temperature=1.0):
    """Return logp [n] of the sampled tokens and routes [N - 1, L, K] of a plain forward over the
    path."""
    path = torch.tensor([[*prompt, *done.token_ids.tolist()]])
    with bind_routers(model).record() as tape:
        logits = model(input_ids=path, use_cache=False).logits[0]
    logp = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logp.gather(-1, done.token_ids.long()[:, None])[:, 0], tape.trace().ids[:-1]


def agreement(a, b):
    """Return the share of (slot, layer) with the same experts."""
    return (a.sort(-1).values == b.sort(-1).values).all(-1).float().mean()


def make_glm():
    """Make a random GLM-4 MoE whose first layer is dense."""
    torch.manual_seed(0)
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.8,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).eval()
