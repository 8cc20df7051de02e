"""A real vLLM server behind the RolloutEngine protocol, started once per session by `onepolicy
engine serve`."""

import asyncio
import functools
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from onepolicy.cli import main
from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.checks import check_completion
from onepolicy.rollout.remote.dialects import vllm as dialect
from onepolicy.rollout.vllm.guard import GENERATE
from onepolicy.sync import broadcast as module
from onepolicy.sync.broadcast import Sender
from onepolicy.sync.push import checked_push
from onepolicy.types import Sampling
from support.own_processes import descendants_of, wait_until_gone
from support.vllm_engines import (
    BLOCK,
    VOCAB,
    FakeLearner,
    ServerProcess,
    again_and_again,
    agreement,
    alone,
    cached_requests,
    check_follows,
    check_supports_of,
    connect,
    followed,
    picked,
    play,
    prompts,
    ragged,
    recipe,
    rows,
    same,
    stock,
)
from support.waiting import LIMIT_S, until

pytestmark = [pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(900)]
ATTEMPTS = 8


@pytest.fixture
def remote(server, folders):
    return connect(server, folders[0])


def test_a_fresh_server_answers_as_the_engine_in_this_process(remote, engine):
    """Equal are tokens, log-probabilities, likeliest tokens, routes and their sources, also for a
    cached prefix."""
    requests = [(p, Sampling(0.7, 12, top_logprobs=3), i) for i, p in enumerate(prompts(3))]
    requests += [(prompts(1)[0], Sampling(1.0, 4, top_logprobs=VOCAB), 7)]
    long = (prompts(1)[0] * 40)[: 2 * BLOCK + 5]
    requests += [(long, Sampling(1.0, 10), seed) for seed in (1, 2)]
    requests += [(prompts(1)[0], Sampling(1.0, 6, routes_from=len(prompts(1)[0]) - 1), 8)]
    asyncio.run(remote.reset_cache())
    sources = []
    for ours, theirs in zip(alone(remote, requests), alone(engine, requests), strict=True):
        same(ours, theirs)
        assert ours.routing.spans == theirs.routing.spans
        assert (ours.finish, ours.version.tolist()) == (theirs.finish, theirs.version.tolist())
        if theirs.top_ids is not None:
            assert torch.equal(ours.top_ids, theirs.top_ids)
            assert torch.equal(ours.top_logp, theirs.top_logp)
        assert ours.first_slot == theirs.first_slot
        sources.append(ours.routing.spans[0].source)
    assert sources[-2:] == ["cache", "prefill"]
    assert len(ours.routing) == 6


def test_probabilities_and_routes_belong_to_their_tokens(remote, models):
    check_follows(remote, models[0], 0.5, count=8)


def test_supports_are_the_trainers_own_sets(remote, models):
    check_supports_of(functools.partial(alone, remote), models[0])


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_after_every_sync_it_equals_a_fresh_engine(server, folders, models, fresh, sync):
    """This holds also where the version before left packed experts and cached prefixes."""
    remote, requests = connect(server, folders[0], sync=sync), cached_requests()
    for version, index in enumerate((1, 1, 0, 1), start=1):
        asyncio.run(remote.load_weights(models[index].state_dict().items(), version))
        followed(remote, fresh, index, version, requests)


class FlipsAByte:
    """A sender that flips a byte of the fourth bucket after its checksum was computed. Some layers
    are loaded before it."""

    def __init__(self, original):
        self.original, self.buckets = original, 0

    def __call__(self, tensors, **where):
        flat = self.original(tensors, **where).clone()
        self.buckets += 1
        if self.buckets == 4:
            flat[0] ^= 1
        return flat


class SendsAnOldVersion(Sender):
    def send(self, weights, version):
        return super().send(weights, version - 1)


WRITE = "write_weight_files"


def rewritten(change, original=dialect.write_weight_files):
    """Return a writer that applies `change` to the files of a step before the server reads them."""

    def written(*args):
        folder, sums = original(*args)
        path = next(folder.glob("*.safetensors"))
        tensors = load_file(path)
        change(tensors, next(name for name in tensors if "experts.7" in name))
        save_file(tensors, path)
        return folder, sums

    return written


def flip(tensors, name):
    tensors[name].view(torch.uint8)[0, 3] ^= 1


BYTES, OLD = FlipsAByte(module.flatten_tensors), SendsAnOldVersion
FAULTS = {
    "broadcast, a flipped byte": ("gloo", module, "flatten_tensors", BYTES, "receiver 1 .*bytes"),
    "broadcast, an old version": ("gloo", dialect, "Sender", OLD, "version 4 came instead"),
    "files, a flipped byte": ("disk", dialect, WRITE, rewritten(flip), r"bytes of '.*experts\.7"),
    "files, no such tensor": (
        "disk",
        dialect,
        WRITE,
        rewritten(dict.pop),
        r"missing, .*experts\.7",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_altered_weights_are_never_sampled_from(server, folders, models, fresh, monkeypatch, fault):
    """The driver gets an error with the reason. The server answers nothing until a complete set
    arrives."""
    sync, where, name, planted, problem = FAULTS[fault]
    remote = connect(server, folders[0], sync=sync)
    monkeypatch.setattr(module, "BUCKET_BYTES", 2**15)
    with monkeypatch.context() as fault_only:
        fault_only.setattr(where, name, planted)
        with pytest.raises(TrainingError, match=problem):
            asyncio.run(remote.load_weights(models[0].state_dict().items(), 5))
    assert remote.version == -1
    with pytest.raises(RuntimeError, match="failed half-way"):
        play(remote, ragged(prompts(1)))
    if sync == "disk":
        # another run comes: it must not take what it finds for what the server was started with
        followed(connect(server, folders[0]), fresh, 0, 0, ragged(prompts(3)))
        return
    asyncio.run(remote.load_weights(models[1].state_dict().items(), 6))
    followed(remote, fresh, 1, 6, ragged(prompts(3)))


def test_the_check_of_the_first_sync_catches_weights_that_are_not_the_ones_sent(
    server, folders, models
):
    """The server says that it has loaded them. The check finds others in it also after an earlier
    run. (vLLM's own reload, the usual cause, is in test_engine.py: the guard lets no run call
    it.)"""
    remote = connect(server, folders[0], sync="disk")
    asyncio.run(checked_push(FakeLearner(models[0]), remote, vocab=VOCAB))
    call_workers = remote.dialect.call_workers

    async def load_others(method, *args, **limits):
        if method != "onepolicy_load_files":
            return await call_workers(method, *args, **limits)
        await call_workers("onepolicy_load", str(folders[1]))
        return [SimpleNamespace(difference=None)]

    try:
        remote.dialect.call_workers = load_others
        with pytest.raises(TrainingError, match=r"vLLM server .* moved the log-probabilities"):
            asyncio.run(checked_push(FakeLearner(models[0]), remote, vocab=VOCAB))
    finally:
        remote.dialect.call_workers = call_workers
        asyncio.run(remote.load_weights(models[0].state_dict().items(), 1))


def test_interrupted_requests_resume_under_new_weights(server, folders, models):
    """On a slow machine the server may end all requests before the update. The test then repeats
    the update."""
    remote = connect(server, folders[0])
    spanning = attempt = 0
    while not spanning and attempt < ATTEMPTS:
        old, new = 2 * attempt, 2 * attempt + 1
        asyncio.run(remote.load_weights(models[0].state_dict().items(), old))
        spanning = check_interrupted(remote, models, old, new)
        attempt += 1
    assert spanning >= 1
    assert remote.take_metrics()["rollout/requests_resumed"] >= spanning


async def interrupted(remote, paths, model, version):
    """Send the server these weights while requests keep coming, and return the completions."""
    updated, running = asyncio.Event(), asyncio.Event()

    async def busy(i):
        """Send one request after the other until the weights have changed. Its length differs from
        its neighbours'."""
        while True:
            done = await remote.generate(paths[i], Sampling(1.0, 45 + i), seed=i)
            if updated.is_set():
                return done
            running.set()

    tasks = [asyncio.create_task(busy(i)) for i in range(len(paths))]
    await running.wait()  # the shortest has ended, the others are in the middle
    await remote.load_weights(model.state_dict().items(), version)
    updated.set()
    return await asyncio.gather(*tasks)


def check_interrupted(remote, models, before, after):
    """Check that every token belongs to its weights, and return how many requests were sampled by
    both versions."""
    paths = prompts(24)
    spanning = 0
    completions = asyncio.run(interrupted(remote, paths, models[1], after))
    for prompt, done in zip(paths, completions, strict=True):
        total, kept = len(done.token_ids), int((done.version == before).sum())
        assert done.version.tolist() == [before] * kept + [after] * (total - kept)
        check_completion(done, prompt, remote.dialect.shape.route_spec, "sample")
        first, second = (stock(model, prompt, done.token_ids) for model in models)
        # the rest was computed anew, by the new weights
        logp = picked(torch.cat([first[0][:kept], second[0][kept:]]), done.token_ids)
        torch.testing.assert_close(done.logp, logp, atol=2e-4, rtol=0)
        if not 0 < kept < total:
            continue
        spanning += 1
        old = len(prompt) + kept - 1  # slots fed before the pause
        routes = torch.cat([first[1][:old], second[1][old:]])
        assert agreement(done.routing.ids, routes) > 0.97
        spans = [
            (0, len(prompt), "prefill", before),
            (len(prompt), kept - 1, "decode", before),
            (old, 1, "prefill", after),
            (old + 1, total - kept - 1, "decode", after),
        ]
        found = [(s.start, s.length, s.source, s.version) for s in done.routing.spans]
        assert found == [span for span in spans if span[1]]
    return spanning


def test_a_cancelled_request_ends_in_the_server(server, folders):
    remote = connect(server, folders[0], retries=12)  # a minute for the server to notice

    async def cancel():
        ended = []
        tasks = [asyncio.create_task(again_and_again(remote, i, ended)) for i in range(24)]
        await until(lambda: len(set(ended)) == 24)  # by now they are anywhere in the middle
        remote.take_metrics()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await remote.reset_cache()  # succeeds once nothing holds a block

    asyncio.run(cancel())
    assert remote.take_metrics()["rollout/requests_dropped"] == 24


def test_servers_of_other_models_and_dtypes_are_refused(server, folders, tmp_path):
    other = json.loads((folders[0] / "config.json").read_text()) | {"num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(UsageError, match=r"num_experts_per_tok is 4, model.path's 2"):
        connect(server, tmp_path)
    with pytest.raises(UsageError, match="bfloat16, but the server runs float32"):
        connect(server, folders[0], dtype="bfloat16")


def test_fatal_requests_are_refused_and_the_server_lives(server, folders, models, fresh, tmp_path):
    """One request has an invalid token id, one follows a checkpoint that fails in the middle of a
    load."""
    once = connect(server, folders[0], retries=0)
    remote = connect(server, folders[0])  # the last one to connect has the server
    with pytest.raises(UsageError, match=r"expected at least one token id in 0\.\.31"):
        play(remote, [([10**6], Sampling(1.0, 4), 0)])
    request = {"token_ids": [10**6], "sampling_params": {"max_tokens": 4, "detokenize": False}}
    with pytest.raises(TrainingError, match=r"status 400.*token_ids\[0\] is 1000000"):
        asyncio.run(remote.client.post(GENERATE, request))
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    weights = load_file(broken / "model.safetensors")
    weights |= {name: t[:1].contiguous() for name, t in weights.items() if "k_proj" in name}
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(TrainingError, match="exceeds dimension size"):
        asyncio.run(once.dialect.call_workers("onepolicy_load", str(broken)))
    with pytest.raises(TrainingError, match=r"status 409.*weights: onepolicy_load has failed"):
        asyncio.run(remote.client.post(GENERATE, request | {"token_ids": [3]}))
    asyncio.run(remote.load_weights(models[1].state_dict().items(), 7))
    followed(remote, fresh, 1, 7, ragged(prompts(3)))


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["command", "server"])
def test_sigkill_of_one_process_ends_the_whole_server(folders, tmp_path, killed):
    server = ServerProcess(folders[0], tmp_path / "log").wait_until_ready()
    pids = descendants_of(server.process.pid)
    assert len(pids) >= 4  # reaper, server, engine, worker
    os.kill({"command": server.process.pid, "server": pids[1]}[killed], signal.SIGKILL)
    server.process.wait(LIMIT_S)
    wait_until_gone(pids)


def check_steps(tmp_path, count):
    steps = [row for row in rows(tmp_path) if "mismatch/k3" in row]
    assert len(steps) == count
    for row in steps:
        assert row["mismatch/k3"] < 1e-6  # float32 on both sides
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert row["rollout/requests"] >= 8
        assert row["rollout/requests_retried"] == row["rollout/requests_dropped"] == 0


def test_two_runs_train_on_one_server(server, folders, tmp_path):
    """The server still has the weights of the first run when the second resumes from its
    checkpoint."""
    assert main(["train", str(recipe(tmp_path, folders[0], server))]) == 0
    check_steps(tmp_path, 2)
    assert main(["train", "--resume", str(tmp_path / "run"), "steps=3"]) == 0
    check_steps(tmp_path, 3)


@pytest.mark.slow
def test_a_run_resumes_after_the_death_of_its_server(folders, tmp_path, capfd, monkeypatch):
    """A kill in the middle of a batch gives one error, and the run resumes on a new server. Both
    servers require a token."""
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    server = ServerProcess(folders[0], tmp_path / "log", token_env="ENGINE_TOKEN")
    try:
        server.wait_until_ready()
        with pytest.raises(UsageError, match=r"/version; got status 401"):
            connect(server, folders[0])
        remote = connect(server, folders[0], retries=1, token_env="ENGINE_TOKEN")
        more = 'engine.token_env = "ENGINE_TOKEN"\n engine.recovery_timeout_s = 5'
        assert main(["train", str(recipe(tmp_path, folders[0], server, more))]) == 0

        async def dies():
            ended = []
            requests = [asyncio.create_task(again_and_again(remote, i, ended)) for i in range(8)]
            await until(lambda: len(ended) >= 8)
            server.kill()
            return await asyncio.gather(*requests)

        with pytest.raises(TrainingError, match=r"/generate, 2 times; got .*--resume"):
            asyncio.run(dies())
        assert main(["train", "--resume", str(tmp_path / "run"), "steps=4"]) == 75
        assert "Is the vLLM server running there" in capfd.readouterr().err
        check_steps(tmp_path, 2)
        server = ServerProcess(folders[0], tmp_path / "another", server.port, "ENGINE_TOKEN")
        server.wait_until_ready()
        assert main(["train", "--resume", str(tmp_path / "run"), "steps=4"]) == 0
        check_steps(tmp_path, 4)
    finally:
        server.kill()
