"""Two real vLLM servers as one engine: one is killed while it samples, and comes back."""

import asyncio

import pytest

from onepolicy.replay.checks import check_completion
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.types import Sampling
from support.vllm_engines import (
    VOCAB,
    FakeLearner,
    ServerProcess,
    agreement,
    connect,
    picked,
    prompts,
    rules_of,
    stock,
)
from support.waiting import until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(1800),
]
SAMPLING = Sampling(1.0, 60)
REQUESTS = 24


@pytest.fixture(scope="module")
def servers(folders, tmp_path_factory):
    logs = tmp_path_factory.mktemp("servers")
    made = [ServerProcess(folders[0], logs / f"{i}.log") for i in range(2)]
    try:
        for each in made:
            each.wait_until_ready()
        yield made  # in which the test replaces one
    finally:
        for each in made:
            each.kill()


async def sample(fleet, seed):
    paths = prompts(REQUESTS, seed)
    done = await asyncio.gather(*(fleet.generate(p, SAMPLING, seed=i) for i, p in enumerate(paths)))
    return list(zip(paths, done, strict=True))


def assert_sampled_with(played, model, version):
    """Every token has the log-probability and the experts of a plain forward of this model."""
    rules = rules_of(model.config)
    for prompt, done in played:
        assert set(done.version.tolist()) == {version}
        check_completion(done, prompt, rules, "a request")
        logits, routes = stock(model, prompt, done.token_ids)
        assert (picked(logits, done.token_ids) - done.logp).abs().max() < 1e-3
        assert agreement(done.routing.ids, routes) > 0.97


def test_a_server_is_killed_and_comes_back(servers, folders, models, tmp_path, caplog):
    learner, urls = FakeLearner(models[0]), tuple(each.url for each in servers)
    fleet = connect(servers[0], folders[0], url=urls, retries=1)
    first, second = models
    asyncio.run(checked_push(learner, fleet, vocab=VOCAB))

    async def kill_one():
        work = asyncio.ensure_future(sample(fleet, 1))
        (victim,) = [each for each in fleet._all if each.name == servers[1].url]
        await until(lambda: len(victim.running) > 3)
        servers[1].kill()
        return await work

    assert_sampled_with(asyncio.run(sample(fleet, 0)), first, 0)
    assert_sampled_with(asyncio.run(kill_one()), first, 0)
    metrics = fleet.take_metrics()
    assert (metrics["rollout/servers"], metrics["rollout/requests_repeated"] > 0) == (1, True)
    assert any(f"{servers[1].url} is lost" in line for line in caplog.messages)

    learner.model, learner.version = second, 1
    asyncio.run(push_weights(learner, fleet))
    asyncio.run(fleet.confirm_weights())
    assert_sampled_with(asyncio.run(sample(fleet, 2)), second, 1)

    servers[1] = ServerProcess(folders[0], tmp_path / "again.log", port=servers[1].port)
    servers[1].wait_until_ready()
    assert_sampled_with(asyncio.run(sample(fleet, 3)), second, 1)  # it has no request yet
    learner.model, learner.version = first, 2
    asyncio.run(push_weights(learner, fleet))
    assert any(f"{servers[1].url} is back" in line for line in caplog.messages)
    fleet.take_metrics()
    assert_sampled_with(asyncio.run(sample(fleet, 4)), first, 2)
    asyncio.run(fleet.confirm_weights())
    assert fleet.take_metrics()["rollout/servers"] == 2
    assert all(each.last_used > 0 for each in fleet._all)
