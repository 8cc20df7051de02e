"""Run requests through an engine and compare with the stock model on the finished paths."""

import asyncio
import random

import torch

from onepolicy.config import HFEngineConfig
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.types import Sampling
from support.models import VOCAB, make


def engine_of(model, *, max_num_seqs=4, return_routes=True, max_len=64, enable_prefix_caching=True):
    config = HFEngineConfig(
        dtype="float32", max_num_seqs=max_num_seqs, enable_prefix_caching=enable_prefix_caching
    )
    return HFEngine(model, config, return_routes=return_routes, max_len=max_len)


def build(name, **settings):
    return engine_of(make(name), **settings)


def prompts(count, low=3, high=25, seed=0):
    rng = random.Random(seed)
    return [
        [rng.randrange(2, VOCAB) for _ in range(rng.randrange(low, high))] for _ in range(count)
    ]


def run(engine, requests):
    """Run all requests at once: (prompt, sampling, seed)."""

    async def together():
        return await asyncio.gather(*(engine.generate(p, s, seed=seed) for p, s, seed in requests))

    return asyncio.run(together())


def ragged(paths, temperature=1.0, spread=20):
    return [(p, Sampling(temperature, 1 + (7 * i) % spread), i) for i, p in enumerate(paths)]


@torch.no_grad()
def teacher_forced(model, prompt, completion, temperature=1.0):
    """Return (logp [n, V] at the sampled tokens, routes [N - 1, L, K]) of one plain forward over
    the whole path."""
    path = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    if completion.routing is None:
        logits, routes = model(input_ids=path, use_cache=False).logits, None
    else:
        with bind_routers(model).record() as tape:
            logits = model(input_ids=path, use_cache=False).logits
        routes = tape.trace().ids[:-1]
    return torch.log_softmax(logits[0].float() / temperature, -1)[len(prompt) - 1 : -1], routes


def check_against_stock(model, requests, completions):
    for (prompt, sampling, _), done in zip(requests, completions, strict=True):
        logp, routes = teacher_forced(model, prompt, done, sampling.temperature or 1.0)
        picked = logp.gather(-1, done.token_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(done.logp, picked, atol=1e-5, rtol=0)
        if asked := sampling.top_logprobs:
            assert done.top_ids.dtype == torch.int32
            assert done.top_ids.shape == (len(done.token_ids), asked)
            for expected in (logp.topk(asked).values, logp.gather(-1, done.top_ids.long())):
                torch.testing.assert_close(done.top_logp, expected, atol=1e-5, rtol=0)
        else:
            assert (done.top_ids, done.top_logp) == (None, None)
        if routes is not None:
            assert len(done.routing) == len(prompt) + len(done.token_ids) - 1
            assert done.routing.valid.all()
            assert torch.equal(done.routing.ids, routes)
