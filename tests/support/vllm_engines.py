"""Shared parts of the tests of vLLM in this process and of a vLLM server: two small random
checkpoints, requests, and transformers' results for them."""

import asyncio
import contextlib
import dataclasses
import socket
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.build.engines import build_engine
from onepolicy.config import ModelConfig, VLLMEngineConfig, VLLMServerConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec, check_completion
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens
from onepolicy.rollout.spec import EngineSpec
from onepolicy.rollout.vllm.engine import VLLMEngine
from onepolicy.support.score import log_probs, support_scores
from onepolicy.tiny.model import make_tokenizer
from onepolicy.types import Sampling
from support import metrics
from support.own_processes import descendants_of, start_process, wait_until_gone
from support.waiting import wait_until

VOCAB, BLOCK, MAX_LEN = 32, 32, 96
START_S = 600
CONFIG = VLLMEngineConfig(dtype="float32", max_num_seqs=64, kv_cache_gib=0.125, block_size=BLOCK)


def make_checkpoints(base, expert_size=32):
    """Make `first`, and `second` with other weights, both with a tokenizer."""
    made = []
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=3,
                num_experts=16,
                num_experts_per_tok=4,
                moe_intermediate_size=expert_size,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=MAX_LEN,
                initializer_range=0.3,
                bos_token_id=None,
                pad_token_id=0,
                eos_token_id=1,
            )
        )
        made.append(base / name)
        model.save_pretrained(made[-1])
        make_tokenizer(task_alphabet(PolicyConfig().task)).save_pretrained(made[-1])
    return made


def rules_of(hf):
    layers = tuple(range(hf.num_hidden_layers))
    return RouteSpec(layers, hf.num_experts, hf.num_experts_per_tok, "error")


class FakeLearner:
    version = 0

    def __init__(self, model):
        self.model = model

    def named_weights(self, dtype=None):
        yield from self.model.state_dict().items()


def open_engine(path):
    config = ModelConfig(path=str(path))
    hf = read_config(config)
    return VLLMEngine(config, hf, CONFIG, route_spec=rules_of(hf), max_len=MAX_LEN, cpu=True)


class ServerProcess:
    """`onepolicy engine serve` and its output."""

    def __init__(self, folder, log, port=None, token_env=None, settings=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = port or free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        names = ("dtype", "max_num_seqs", "kv_cache_gib", "block_size")
        settings = [*(f"{name}={getattr(CONFIG, name)}" for name in names), *settings]
        serve = [sys.executable, "-m", "onepolicy", "engine", "serve", "--port", str(self.port)]
        serve += ["--token-env", token_env, str(folder)] if token_env else [str(folder)]
        with log.open("ab") as file:
            self.process = start_process([*serve, *settings], stdout=file, stderr=file)

    def wait_until_ready(self):
        def ready():
            said = self.log.read_text()
            assert self.process.poll() is None, said
            return "ready after" in said

        wait_until(ready, START_S, poll=0.1)
        return self

    def kill(self):
        """Kill the server as a crash would, without a goodbye, and see all its processes end."""
        below = descendants_of(self.process.pid)
        self.process.kill()  # the reaper below it kills the others
        self.process.wait()
        wait_until_gone(below)

    def stop(self):
        self.process.terminate()
        self.process.wait(START_S)


@contextlib.contextmanager
def serving_adapters(folder, log=None):
    """Run a server of the usual dtype that takes adapters of rank 16."""
    with tempfile.TemporaryDirectory() as own:
        log = log or Path(own) / "log"
        server = ServerProcess(folder, log, settings=("dtype=bfloat16", "lora_rank=16"))
        try:
            yield server.wait_until_ready()
        finally:
            server.stop()


def connect(server, path, **settings):
    """Connect as a run does: the server with the weights of `path`."""
    config = VLLMServerConfig(**{"url": server.url, "dtype": "float32"} | settings)
    model = ModelConfig(path=str(path))
    rules = rules_of(read_config(model))
    return build_engine(EngineSpec(model, config, torch.device("cpu"), MAX_LEN, route_spec=rules))


def recipe(tmp_path, folder, server, more=""):
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"""
        out = "{tmp_path / "run"}"
        steps = 2
        model = {{ path = "{folder}" }}
        task = {{ kind = "chain", ops = 2 }}
        optim = {{ lr = 1e-3 }}
        eval = {{ every = 2, problems = 4, k = 1 }}
        log = {{ counterfactual_every = 1, tensorboard = false, report = false }}
        checkpoint = {{ every = 1 }}
        [rollout]
        prompts_per_step = 2
        group_size = 4
        sampling = {{ max_tokens = 20 }}
        engine.kind = "vllm-server"
        engine.url = "{server.url}"
        engine.dtype = "float32"
        engine.max_num_seqs = 8
        engine.retries = 1
        {more}
        """
    )
    return path


def rows(tmp_path):
    return metrics.rows(tmp_path / "run")


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 25, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


async def again_and_again(engine, index, ended):
    """Ask until the caller ends it, so that a request is always on its way to a server of any
    speed. `ended` gets the index of each answered request."""
    while True:
        await engine.generate([3, index], Sampling(1.0, 45 + index), seed=index)
        ended.append(index)


def play(engine, requests):
    """Run all requests at once: (prompt, sampling, seed)."""

    async def together():
        return await asyncio.gather(*(engine.generate(p, s, seed=seed) for p, s, seed in requests))

    return asyncio.run(together())


def alone(engine, requests):
    """Run one request at a time, with nothing cached at first: other requests in the batch would
    change the last bits."""
    asyncio.run(engine.reset_cache())
    return [play(engine, [request])[0] for request in requests]


def same(ours, theirs):
    """Check that both are equal, bit for bit."""
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.logp, theirs.logp)
    assert torch.equal(ours.routing.ids, theirs.routing.ids)


def followed(engine, fresh, index, version, requests):
    """Check that an engine with checkpoint `index` answers as one that loaded it at its start, from
    nothing cached."""
    assert engine.version == version
    # what an update left in the cache would show
    ours = [play(engine, [request])[0] for request in requests]
    for done, theirs in zip(ours, alone(fresh[index], requests), strict=True):
        same(done, theirs)
        assert (done.version == version).all()
        assert {span.version for span in done.routing.spans} == {version}
    for done, theirs in zip(ours, alone(fresh[1 - index], requests), strict=True):
        assert not torch.equal(done.logp, theirs.logp)


def cached_requests():
    """Return requests, some with a prompt of several blocks: the second of these finds the first
    one's in the cache."""
    long = (prompts(1)[0] * 40)[: 2 * BLOCK + 5]
    return [*ragged(prompts(3)), (long, Sampling(1.0, 8), 7), (long, Sampling(0.7, 8), 8)]


def ragged(paths, temperature=1.0):
    return [(p, Sampling(temperature, 5 + 3 * i), i) for i, p in enumerate(paths)]


@torch.no_grad()
def stock(model, prompt, tokens):
    """Return logits [n, V] of a plain forward at the sampled tokens, and the routes [N - 1, L, K]
    of the path."""
    path = torch.tensor([[*prompt, *tokens.tolist()]])
    with bind_routers(model).record() as tape:
        logits = model(input_ids=path, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1], tape.trace().ids[:-1]


def picked(logits, tokens):
    """Return the log-probabilities [n] of the tokens."""
    return torch.log_softmax(logits, -1).gather(-1, tokens.long()[:, None])[:, 0]


def agreement(ours, theirs):
    """Return the share of (slot, layer) with the same experts."""
    return float((ours.sort(-1).values == theirs.sort(-1).values).all(-1).float().mean())


def check_follows(engine, model, temperature=1.0, count=6):
    """Check that log-probabilities and routes are those of this model. Return the completions."""
    requests, agreeing = ragged(prompts(count), temperature), []
    played = play(engine, requests)
    for (prompt, sampling, _), done in zip(requests, played, strict=True):
        logits, routes = stock(model, prompt, done.token_ids)
        expected = picked(logits / temperature, done.token_ids)
        torch.testing.assert_close(done.logp, expected, atol=2e-4, rtol=0)
        assert (len(done.token_ids), done.finish) == (sampling.max_tokens, "length")
        check_completion(done, prompt, rules_of(model.config), "sample")
        agreeing.append(agreement(done.routing.ids, routes))
    assert min(agreeing) > 0.97
    return list(zip(requests, played, strict=True))


def check_supports_of(play, model):
    """Check that sets and log-probabilities over them are those of transformers' own logits.

    play: returns the completions of requests (prompt, sampling, seed).
    """
    kinds = [{"top_k": 5}, {"top_k": 20, "top_p": 0.8}, {"top_k": 12, "min_p": 0.05}]
    requests = [
        (path, Sampling(0.7, 12, support=True, **kinds[i % 3]), i)
        for i, path in enumerate(prompts(9))
    ]
    asked_both = dataclasses.replace(requests[0][1], top_logprobs=2, support_logp=True)
    requests.append((requests[0][0], asked_both, 0))
    completions = play(requests)
    for (path, sampling, _), done in zip(requests, completions, strict=True):
        tempered = stock(model, path, done.token_ids)[0] / sampling.temperature
        rows = BatchSampling.from_requests([sampling] * len(tempered), tempered.device)
        sets = sample_tokens(tempered * sampling.temperature, torch.zeros(len(tempered)), rows)
        assert done.support.as_sets() == [kept.ids.tolist() for kept in sets.support]
        logp = log_probs(tempered, done.token_ids, support=done.support)
        torch.testing.assert_close(done.logp, logp, atol=5e-4, rtol=0)
        assert done.top_ids is None or done.top_ids.shape == (12, 2)
    valued = completions[-1].support
    assert completions[0].support == valued.without_logp()
    tempered = stock(model, requests[0][0], completions[0].token_ids)[0] / 0.7
    expected = support_scores(tempered, completions[0].token_ids.long(), valued).kept_logp
    torch.testing.assert_close(valued.logp, expected, atol=5e-4, rtol=0)
    assert completions[0].top_ids is None
    assert completions[-1].top_ids is not None
