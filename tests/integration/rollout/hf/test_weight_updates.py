"""Weights that arrive while requests run: sampled tokens stay, and the new weights sample the
rest."""

import asyncio

import pytest
import torch

from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.replay.routers import bind_routers
from onepolicy.types import Sampling
from support.engine_runs import engine_of, prompts, ragged, run, teacher_forced
from support.models import make
from support.recurrent_models import hybrid

TURNS = 6
UPDATES = (1, 3, 4, 9)  # turns of the event loop before each update


async def interrupted(engine, requests, versions):
    """Run the requests with these updates. versions: the weights of each update in turn. Return the
    completions."""
    tasks = [asyncio.create_task(engine.generate(p, s, seed=seed)) for p, s, seed in requests]
    for version, (turns, weights) in enumerate(zip(UPDATES, versions, strict=False), start=1):
        for _ in range(turns):
            await asyncio.sleep(0)
        await engine.load_weights(weights.items(), version)
    return await asyncio.gather(*tasks)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def runs(versions):
    values, counts = torch.unique_consecutive(versions, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def test_the_same_weights_again_change_no_token():
    """Random numbers belong to a token's position, however often its request is interrupted; 12
    requests on 4 rows."""
    model, requests = make("qwen3_moe"), ragged(prompts(12, 10, 20))
    weights = weights_of(model)
    whole = run(engine_of(make("qwen3_moe")), requests)
    parts = asyncio.run(interrupted(engine_of(model), requests, [weights] * 4))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.finish, len(one.routing)) == (other.finish, len(other.routing))
        assert torch.equal(one.routing.ids, other.routing.ids)
        torch.testing.assert_close(one.logp, other.logp, atol=1e-5, rtol=0)
    assert sum(len(runs(done.version)) > 1 for done in parts) > 2
    assert any(done.version[0] > 0 for done in parts)  # waited for a slot during the first update


@pytest.mark.parametrize(
    "family", [make, lambda name: hybrid("lfm2_moe")], ids=["attention", "recurrent"]
)
def test_every_token_and_route_belongs_to_its_version(family):
    models = [family("qwen3_moe") for _ in range(3)]
    for i, model in enumerate(models[1:], start=1):
        torch.manual_seed(i)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
    weights = list(map(weights_of, models))
    requests = [(p, Sampling(1.0, 20), i) for i, p in enumerate(prompts(4, 10, 11))]
    done = asyncio.run(interrupted(engine_of(family("qwen3_moe")), requests, weights[1:]))
    for (prompt, _, _), completion in zip(requests, done, strict=True):
        by = [teacher_forced(model, prompt, completion) for model in models]
        versions = completion.version.long()
        assert versions.diff().min() >= 0
        logp = torch.stack([logp for logp, _ in by])[versions, torch.arange(20)]
        picked = logp.gather(-1, completion.token_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(completion.logp, picked, atol=1e-5, rtol=0)
        # a sampled token is fed by who samples the next one; a prompt by who samples the first one
        fed_by = torch.cat([versions[:1].expand(len(prompt) - 1), versions])
        routes = torch.stack([routes for _, routes in by])[fed_by, torch.arange(len(fed_by))]
        assert torch.equal(completion.routing.ids, routes)
        spans = [torch.full((span.length,), span.version) for span in completion.routing.spans]
        assert torch.equal(torch.cat(spans), fed_by)
        assert len(runs(versions)) > 1


def test_an_episode_of_several_turns_continues_over_updates():
    """Three episodes of six turns have an update every few tokens, in turns and between them."""
    models = [make("qwen3_moe", seed=seed) for seed in range(8)]
    weights = list(map(weights_of, models))
    engine = engine_of(make("qwen3_moe", seed=0), max_num_seqs=3)

    async def episode(seed):
        path = Trajectory(prompts(1, 8, 9, seed=seed)[0])
        for turn in range(TURNS):
            asked = Sampling(1.0, 4, routes_from=path.first_missing_route)
            done = await engine.generate(path.tokens, asked, seed=100 * seed + turn)
            path.append_completion(done)
            path.append_observation([3 + turn, 5, 7])
        return path.to_sample(reward=0.0, temperature=1.0)

    async def main():
        tasks = [asyncio.create_task(episode(seed)) for seed in range(3)]
        for version in range(1, len(models)):
            for _ in range(6):
                await asyncio.sleep(0)
            await engine.load_weights(weights[version].items(), version)
        return await asyncio.gather(*tasks)

    for sample in asyncio.run(main()):
        mine, versions = sample.trainable, sample.version.long()
        assert (sample.response_length, sample.routing.valid.all()) == (4 * TURNS, True)
        assert len(set(versions[mine].tolist())) > 3
        by = [forced(model, sample.tokens) for model in models]
        logp = torch.stack([logp for logp, _ in by])
        logp = logp[versions.clamp(min=0), torch.arange(len(versions))]
        torch.testing.assert_close(sample.logp_rollout[mine], logp[mine], atol=1e-5, rtol=0)
        for span in sample.routing.spans:
            rows = slice(span.start, span.start + span.length)
            assert torch.equal(sample.routing.ids[rows], by[span.version][1][rows])


@torch.no_grad()
def forced(model, tokens):
    """Return (logp [T] of the path's own tokens, routes [T, L, K]) of one plain forward."""
    with bind_routers(model).record() as tape:
        logits = model(input_ids=tokens.long()[None], use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None].long())[:, 0]
    return logp, tape.trace().ids[:-1]


def test_top_logprobs_and_asked_routes_go_on_as_well():
    model = make("qwen3_moe")
    weights = weights_of(model)
    requests = [([2, 3, 4, 5], Sampling(1.0, 12, top_logprobs=3, routes_from=2), 0)]
    (done,) = asyncio.run(interrupted(engine_of(model), requests, [weights] * 2))
    (whole,) = run(engine_of(make("qwen3_moe")), requests)
    assert (done.first_slot, len(done.routing)) == (2, 4 + 12 - 1 - 2)
    assert torch.equal(done.top_ids, whole.top_ids)
    assert torch.equal(done.routing.ids, whole.routing.ids)


def test_a_failed_update_ends_the_running_requests():
    engine = engine_of(make("qwen3_moe"))

    async def main():
        calls = (engine.generate([2, 3, 4], Sampling(1.0, 9), seed=seed) for seed in range(6))
        tasks = list(map(asyncio.create_task, calls))
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="missing"):
            await engine.load_weights([], 1)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    for error in asyncio.run(main()):
        assert isinstance(error, RuntimeError)
        assert "half-way" in str(error)
