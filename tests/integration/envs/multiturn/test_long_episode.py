"""60 turns: every route arrives once, and the trainer's log-probabilities are those of one forward
over the whole path."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from onepolicy.config import HFEngineConfig
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Group, Sampling
from support.models import CONFIGS, VOCAB

TURNS, TURN, OBSERVED, PROMPT = 60, 4, 6, 12
MAX_LEN = PROMPT + TURNS * (TURN + OBSERVED)


def make(seed: int = 0):
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.max_position_embeddings = MAX_LEN
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


async def episode(engine: HFEngine, seed: int) -> tuple[Trajectory, list[Completion]]:
    """Play an episode of random observations after turns of TURN tokens."""
    draw, done = random.Random(seed), []
    path = Trajectory([draw.randrange(2, VOCAB) for _ in range(PROMPT)])
    for turn in range(TURNS):
        asked = Sampling(1.0, TURN, routes_from=path.first_missing_route)
        done.append(await engine.generate(path.tokens, asked, seed=1000 * seed + turn))
        path.append_completion(done[-1])
        path.append_observation([draw.randrange(2, VOCAB) for _ in range(OBSERVED)])
    return path, done


@pytest.fixture(scope="module")
def played():
    engine = HFEngine(
        make(), HFEngineConfig(dtype="float32", max_num_seqs=3), return_routes=True, max_len=MAX_LEN
    )

    async def together():
        return await asyncio.gather(*(episode(engine, seed) for seed in range(3)))

    return asyncio.run(together())


@pytest.mark.full
def test_every_route_travels_once(played):
    for path, done in played:
        sample = path.to_sample(reward=0.0, temperature=1.0)
        moved = sum(len(completion.routing) for completion in done)
        assert sample.routing.valid.all()
        assert len(sample.tokens) == MAX_LEN - OBSERVED
        assert moved <= 1.05 * len(sample.routing)
        assert moved == len(sample.routing)
        assert sample.turn.max() == TURNS - 1
        assert sample.response_length == TURNS * TURN


def test_a_turn_computes_only_its_new_tokens(played):
    """Each later prompt prefills only the last sampled token and the observation. The rest is in
    the KV cache."""
    for _, done in played:
        for completion in done[1:]:
            (prefill, decode) = completion.routing.spans
            assert (prefill.source, prefill.length) == ("prefill", 1 + OBSERVED)
            assert (decode.source, decode.length) == ("decode", TURN - 1)


def test_log_probabilities_are_those_of_one_forward(played):
    """Engine, packed trainer and a plain forward of the stock model agree, all with the recorded
    routes."""
    samples = [path.to_sample(reward=0.0, temperature=1.0) for path, _ in played]
    batch = pack([Group(0, tuple(dataclasses.replace(sample, outcome=0.0) for sample in samples))])
    model, plain = make(), make()
    prepare_for_training(model, torch.device("cpu"))
    with torch.no_grad(), bind_routers(model).replay(batch.routing, check=False):
        packed = forward(model, batch).logp
    for s, sample in enumerate(samples):
        with torch.no_grad(), bind_routers(plain).replay(sample.routing, check=False):
            logits = plain(input_ids=sample.tokens[None, :-1].long(), use_cache=False).logits[0]
        logp = torch.log_softmax(logits.float(), -1).gather(-1, sample.tokens[1:, None].long())[
            :, 0
        ]
        mine = sample.trainable
        torch.testing.assert_close(packed[batch.segment == s][mine], logp[mine], atol=2e-5, rtol=0)
        torch.testing.assert_close(sample.logp_rollout[mine], logp[mine], atol=2e-5, rtol=0)
