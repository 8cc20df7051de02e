"""Episodes of several turns on vLLM with its prefix cache on: the rows that travel, against a plain
forward."""

import asyncio
import random

import pytest
import torch

from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.types import Sampling
from support.vllm_engines import BLOCK, VOCAB, agreement, picked, play, stock

pytestmark = pytest.mark.vllm

TURNS, TURN, OBSERVED, PROMPT = 6, 4, 8, 10
# up to the last sampled token: two whole blocks
LENGTH = PROMPT + TURNS * (TURN + OBSERVED) - OBSERVED


async def episode(engine, seed):
    draw, done = random.Random(seed), []
    path = Trajectory([draw.randrange(2, VOCAB) for _ in range(PROMPT)])
    for turn in range(TURNS):
        asked = Sampling(1.0, TURN, routes_from=path.first_missing_route)
        done.append(await engine.generate(path.tokens, asked, seed=100 * seed + turn))
        path.append_completion(done[-1])
        if turn < TURNS - 1:
            path.append_observation([draw.randrange(2, VOCAB) for _ in range(OBSERVED)])
    return path, done


@pytest.fixture
def played(engine):
    async def together():
        return await asyncio.gather(*(episode(engine, seed) for seed in range(3)))

    return asyncio.run(together())


def test_every_row_travels_once(played):
    for path, done in played:
        trace = path.to_sample(reward=0.0, temperature=1.0).routing
        assert len(trace) == LENGTH - 1
        assert trace.valid.all()
        assert sum(completion.routing.ids.numel() for completion in done) == trace.ids.numel()
        # last sampled tokens of the turns
        ends = [PROMPT + turn * (TURN + OBSERVED) + TURN - 1 for turn in range(TURNS)]
        assert [completion.first_slot for completion in done] == [0, *ends[:-1]]
        sources = [span.source for span in trace.spans for _ in range(span.length)]
        assert {sources[end] for end in ends[:-1]} == {"prefill"}
        assert {sources[end - 1] for end in ends} == {"decode"}


def test_rows_and_log_probabilities_are_those_of_one_forward(played, models):
    for path, _ in played:
        sample = path.to_sample(reward=0.0, temperature=1.0)
        first, rest = sample.tokens[:1].tolist(), sample.tokens[1:]
        logits, routes = stock(models[0], first, rest)
        mine = sample.trainable
        assert agreement(sample.routing.ids, routes) > 0.97
        logp = picked(logits, rest)
        torch.testing.assert_close(sample.logp_rollout[mine], logp[mine], atol=2e-4, rtol=0)


def test_the_prefix_cache_held_those_rows(played, engine):
    """Each path is asked for once more with all its rows. The rows of whole blocks come from the
    cache and are the same."""
    for path, _ in played:
        trace = path.to_sample(reward=0.0, temperature=1.0).routing
        (again,) = play(engine, [(path.tokens, Sampling(0.0, 1), 0)])
        cached = again.routing.spans[0]
        assert (cached.source, cached.length) == ("cache", LENGTH // BLOCK * BLOCK)
        assert torch.equal(again.routing.ids[: cached.length], trace.ids[: cached.length])
