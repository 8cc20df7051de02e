"""Weights of a vLLM server: pauses, requests that continue under new weights, one run after
another."""

import asyncio
import shutil

import numpy as np
import pytest
import torch

from onepolicy.build.engines import build_engine
from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError, VLLMServerConfig
from onepolicy.replay.checks import check_completion
from onepolicy.rollout.remote.client import EngineLost, EngineUnreachable
from onepolicy.rollout.remote.dialects.vllm_replies import resumed_seed
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync import broadcast
from onepolicy.sync.buckets import unflatten_bucket
from onepolicy.sync.push import checked_push
from onepolicy.sync.weight_files import read_weights
from onepolicy.train.checkpoint import write_index
from onepolicy.types import Sampling
from support import fake_vllm
from support.fake_learner import FakeLearner
from support.fake_vllm import (
    GENERATE,
    RULES,
    TABLE,
    VOCAB,
    aborted_at_once,
    connected,
    embedding,
    engine_of,
    one,
    routes_of,
)
from support.http_server import Reply
from support.waiting import until


def load(engine, checkpoint, version):
    asyncio.run(engine.load_weights(checkpoint[1].state_dict().items(), version))


def holds(fake, checkpoint):
    return np.array_equal(fake.table, checkpoint[1].state_dict()[TABLE].numpy())


def test_a_pause_that_was_left_behind_is_lifted(fake):
    fake.paused.set()
    assert len(one(connected(fake)).token_ids) == 6


def test_requests_continue_after_an_update_and_name_their_weights(fake, checkpoints):
    """One request is interrupted in the middle, one is held back before it began, and one reaches
    the server only after the pause."""
    engine = connected(fake, max_num_seqs=4)
    asyncio.run(checked_push(FakeLearner(checkpoints[0][1], version=0), engine, vocab=VOCAB))
    fake.hold, fake.sampled = 5, 0
    prompts = [[3, 4, i] for i in range(8)]

    async def interrupted():
        calls = [engine.generate(p, Sampling(1.0, 40), seed=i) for i, p in enumerate(prompts)]
        tasks = list(map(asyncio.create_task, calls))
        await fake.sampling(20)  # by all of the four that may run
        await engine.load_weights(checkpoints[1][1].state_dict().items(), 5)
        return await asyncio.gather(*tasks)

    done = asyncio.run(interrupted())
    tables = {v: m.state_dict()[TABLE] for v, (_, m) in zip((0, 5), checkpoints, strict=True)}
    num_split = 0
    for prompt, completion in zip(prompts, done, strict=True):
        tokens, versions = completion.token_ids.long(), completion.version
        assert (len(tokens), completion.finish) == (40, "length")
        assert (versions.diff() >= 0).all()
        num_split += len(versions.unique()) == 2
        fed = torch.cat([torch.tensor(prompt[-1:]), tokens[:-1]])
        for version, table in tables.items():
            own = versions == version
            logp = torch.log_softmax(table[fed[own]] @ table.T, -1).gather(-1, tokens[own, None])
            torch.testing.assert_close(completion.logp[own], logp[:, 0], atol=1e-5, rtol=0)
        check_completion(completion, prompt, RULES, "sample")
        expected = routes_of([*prompt, *tokens.tolist()])[:-1]
        assert torch.equal(completion.routing.ids, torch.from_numpy(expected))
        kept, spans = int((versions == 0).sum()), completion.routing.spans
        fed_by_old = 2 + kept if kept else 0  # its last token was not fed
        assert sum(s.length for s in spans if s.version == 0) == fed_by_old
        assert sum(s.length for s in spans) == 42
    assert num_split == 4
    assert engine.take_metrics()["rollout/requests_resumed"] >= 4
    asked = [r.body for r in fake.server.asked if r.path == GENERATE and r.params == {}]
    seeds = {body["sampling_params"]["seed"] for body in asked}
    assert {resumed_seed(0, int((done[0].version == 0).sum())), 0} <= seeds


def test_a_request_under_way_at_a_pause_is_not_left_waiting(fake, checkpoints):
    """The pause reaches the server before the request does, which would wait there for the new
    weights."""
    engine = connected(fake)

    async def late():
        fake.paused.set()  # as if the pause below had overtaken it
        before = fake.server.count(GENERATE)
        task = asyncio.create_task(engine.generate([3], Sampling(1.0, 5), seed=0))
        await until(lambda: fake.server.count(GENERATE) > before)
        assert not task.done()
        await engine.load_weights(checkpoints[1][1].state_dict().items(), 2)
        return await task

    assert (asyncio.run(late()).version == 2).all()


def test_requests_aborted_by_others_are_resumed(fake):
    engine = connected(fake)
    fake.hold, fake.sampled = 3, 0

    async def aborted():
        task = asyncio.create_task(engine.generate([3], Sampling(1.0, 80), seed=0))
        await fake.sampling(3)
        fake.hold = None
        fake.aborts += 1
        return await task

    done = asyncio.run(aborted())
    assert (len(done.token_ids), done.finish) == (80, "length")
    check_completion(done, [3], RULES, "sample")


def test_a_server_that_returns_no_token_is_asked_again_and_then_lost(fake):
    engine = connected(fake)
    good, left = one(engine), [aborted_at_once]
    fake.spoil[GENERATE] = lambda reply, _: left.pop()(reply) if left else reply
    assert torch.equal(one(engine).token_ids, good.token_ids)
    assert engine.take_metrics()["rollout/requests_retried"] == 1
    fake.spoil[GENERATE] = aborted_at_once
    with pytest.raises(EngineLost, match=r"3 times; got .*no token, and nothing of ours aborted"):
        one(engine)
    assert engine.take_metrics()["rollout/requests_retried"] == 2


def test_a_server_that_is_replaced_during_the_pause_gets_no_weights(fake, checkpoints):
    engine = connected(fake)
    load(engine, checkpoints[1], 1)
    fake.hold, fake.sampled = 5, 0

    def replace(reply, _):
        fake.weights = "default"
        return reply

    fake.spoil["/pause"] = replace

    async def replaced():
        task = asyncio.create_task(engine.generate([3], Sampling(1.0, 20), seed=0))
        await fake.sampling(5)
        with pytest.raises(EngineLost, match="holds weights 'default', not this run's"):
            await engine.load_weights(checkpoints[0][1].state_dict().items(), 2)
        with pytest.raises(EngineLost, match="holds weights 'default'"):
            await task  # it waited for the end of the update

    asyncio.run(replaced())
    assert fake.weights == "default"
    assert holds(fake, checkpoints[1])
    with pytest.raises(EngineLost, match="holds weights 'default'"):
        one(engine)


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_a_failed_update_leaves_no_engine_behind(fake, checkpoints, sync):
    engine = connected(fake, retries=0, sync=sync)
    asyncio.run(engine.dialect.store_canary([0.0]))
    fake.spoil["/collective_rpc"] = lambda reply, number: Reply({"error": "out of memory"}, 500)
    with pytest.raises(TrainingError, match="out of memory"):
        load(engine, checkpoints[1], 1)
    with pytest.raises(EngineLost, match="out of memory"):
        one(engine)
    assert fake.paused.is_set()
    assert fake.weights.endswith("-incomplete")
    assert not engine.has_initial_checkpoint(fake.model)
    fake.spoil.clear()
    # gives it back what it was started with before asking it for anything
    next_run = connected(fake)
    assert holds(fake, checkpoints[0])
    assert len(one(next_run).token_ids) == 6


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_weights_reach_the_server_and_altered_ones_are_refused(
    fake, checkpoints, sync, monkeypatch
):
    engine = connected(fake, sync=sync)
    load(engine, checkpoints[1], 1)
    assert holds(fake, checkpoints[1])
    assert engine.version == 1

    def altered(weights):
        for name, tensor in weights:
            yield name, tensor * 2 if name == TABLE else tensor

    def read(folder):
        return altered(read_weights(folder))

    def unflatten(*args):
        return dict(altered(unflatten_bucket(*args).items()))

    with monkeypatch.context() as patch:
        patch.setattr(fake_vllm, "read_weights", read)
        patch.setattr(broadcast, "unflatten_bucket", unflatten)
        with pytest.raises(TrainingError, match=f"bytes of '{TABLE}' are not those that were sent"):
            load(engine, checkpoints[0], 2)
    assert engine.version == -1
    load(engine, checkpoints[0], 3)
    assert (one(engine).version == 3).all()


def test_a_server_that_cannot_reach_the_trainer_fails_at_once(fake, checkpoints):
    engine = connected(fake)
    fake.cut_off = True
    with pytest.raises(TrainingError, match="cannot join the sender of the weights"):
        load(engine, checkpoints[1], 1)
    assert engine.version == -1


def test_weights_that_do_not_fit_are_refused_with_the_finders_message(fake):
    engine = connected(fake)
    with pytest.raises(UsageError, match="'nonsense' is not a tensor"):
        asyncio.run(engine.load_weights([("nonsense", torch.zeros(1))], 1))
    assert engine.version == -1


@pytest.mark.parametrize("config", [VLLMServerConfig(sync="nccl"), SGLangConfig(sync="nccl")])
def test_nccl_needs_gpus_on_both_sides(fake, config):
    model = ModelConfig(path=fake.model)
    with pytest.raises(UsageError, match="nccl, but the trainer computes on the cpu"):
        build_engine(EngineSpec(model, config, torch.device("cpu"), 96))
    with pytest.raises(UsageError, match="nccl, but the server computes on cpu"):
        connected(fake, sync="nccl")


def test_a_server_serves_one_run_after_another(fake, checkpoints):
    """The next run has another model.path. The server's own weights are reloaded first, and
    compared with their answers at the start."""
    engine = connected(fake)
    asyncio.run(engine.attach(fake.model))
    assert fake.weights == "default"  # nothing had to be loaded
    load(engine, checkpoints[1], 9)
    second = connected(fake)
    asyncio.run(second.attach(fake.model))
    assert torch.equal(one(second).logp, one(connected(fake)).logp)
    asyncio.run(connected(fake).attach(checkpoints[1][0]))
    assert holds(fake, checkpoints[1])


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_a_server_that_does_not_see_a_runs_checkpoint_is_sent_it(
    fake, checkpoints, sync, tmp_path, monkeypatch, caplog
):
    """Its machine has another disk. Weights that travel as files need a folder that both see."""
    folder = copied_checkpoint(checkpoints[1], tmp_path)

    def own_disk(path):
        if path != fake.model:
            raise FileNotFoundError(path)
        return embedding(path)

    monkeypatch.setattr(fake_vllm, "embedding", own_disk)
    engine = engine_of(fake, sync=sync, sync_dir=str(tmp_path))
    if sync == "disk":
        with pytest.raises(EngineUnreachable, match=f"to load {folder}: if it cannot read that"):
            asyncio.run(engine.start(folder))
        return
    asyncio.run(engine.start(folder))
    assert holds(fake, checkpoints[1])
    assert (one(engine).version == 0).all()
    assert caplog.messages == [f"{engine.name} could not load {folder}; it is sent the weights"]


def copied_checkpoint(checkpoint, base):
    """Return a folder with the model as a run's checkpoint has it."""
    folder = shutil.copytree(checkpoint[0], base / "checkpoint")
    write_index(folder)
    return str(folder)


def test_a_reload_that_is_wrong_every_time_is_noticed(fake, checkpoints):
    asyncio.run(connected(fake).attach(fake.model))
    fake.spoil["/collective_rpc"] = lambda reply, number: (
        setattr(fake, "table", fake.table * 1.5) or reply
    )
    with pytest.raises(UsageError, match="its weights are wrong after a reload"):
        asyncio.run(connected(fake).attach(checkpoints[1][0]))
    learner = FakeLearner(checkpoints[1][1], version=0)
    with pytest.raises(TrainingError, match="moved the log-probabilities"):
        asyncio.run(checked_push(learner, connected(fake), vocab=VOCAB))


def test_weights_of_another_program_cannot_be_checked(fake, checkpoints):
    fake.weights = "somebody-3"
    with pytest.raises(UsageError, match="weights 'somebody-3', which another program gave it"):
        asyncio.run(connected(fake).attach(fake.model))


@pytest.mark.parametrize("canary", [[], [-0.5] * 17])
def test_a_canary_of_another_length_is_refused(fake, canary):
    fake.told = {"initial_canary": canary}
    with pytest.raises(UsageError, match=f"a canary of {len(canary)} numbers .*, expected "):
        asyncio.run(connected(fake).check_reload())


REPORTS = [
    ({"results": []}, "results of onepolicy_{}: 0 of 1 workers"),
    ({"results": [{"problem": None, "difference": None}] * 2}, "2 of 1 workers"),
    ({"results": [None]}, "a result of onepolicy_{} is NoneType, expected an object"),
    ({"results": [{}]}, "(problem|difference) is missing"),
    (
        {"results": [{"problem": [1], "difference": [1]}]},
        "(problem|difference) is list, expected",
    ),
    ({"results": 3}, "results is int, expected list"),
]


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_what_workers_say_of_an_update_is_checked(fake, checkpoints, subtests, sync):
    method = {"gloo": "receive", "disk": "load_files"}[sync]
    for told, message in REPORTS:
        engine = connected(fake, retries=0, sync=sync)
        fake.spoil["/collective_rpc"] = lambda reply, _, told=told: told
        refused = pytest.raises(TrainingError, match=message.format(method))
        with subtests.test(told=told), refused as caught:
            load(engine, checkpoints[1], 1)
        assert fake.server.url + "/collective_rpc" in str(caught.value)
        fake.spoil.clear()
        fake.weights = "default"  # as after a restart, for the next engine
