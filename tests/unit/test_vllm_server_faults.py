"""The engine over HTTP against a server in miniature: what it makes of faults, pauses, restarts and wrong servers."""

import asyncio
import base64
import json
import pickle

import numpy as np
import pytest
import torch
from fake_vllm import EXPERTS, LAYERS, TOP_K, VOCAB, FakeVLLM, edited, npy, routes_of
from http_support import Reply
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import ModelConfig, TrainingError, UsageError, VLLMServerConfig
from onepolicy.replay.checks import RouteRules, check_completion
from onepolicy.rollout import http
from onepolicy.rollout.vllm.server import VLLMServer, continued
from onepolicy.rollout.vllm.worker import shape_of
from onepolicy.sync.check import adopt, checked_push
from onepolicy.types import Sampling

HF = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    moe_intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=96,
    initializer_range=0.7,
)
RULES = RouteRules(tuple(range(LAYERS)), EXPERTS, TOP_K, "error")
GENERATE = "/inference/v1/generate"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(HF)
        folder = tmp_path_factory.mktemp("fake") / str(seed)
        model.save_pretrained(folder)
        made.append((str(folder), model))
    return made


@pytest.fixture
def fake(models):
    fake = FakeVLLM(models[0][0], shape_of(HF))
    with fake.server:
        yield fake


@pytest.fixture(scope="module")
def steady(models):
    """A server and an engine that many tests share: they leave nothing behind but the counters."""
    fake = FakeVLLM(models[0][0], shape_of(HF))
    with fake.server:
        yield fake, connected(fake)


def engine_of(fake, **settings):
    config = VLLMServerConfig(**{"url": fake.server.url, "dtype": "float32", "retries": 2, "timeout_s": 5.0} | settings)
    return VLLMServer(ModelConfig(path=fake.model), HF, config, routes=RULES, max_len=96)


def connected(fake, **settings):
    engine = engine_of(fake, **settings)
    with engine.client.starting():
        asyncio.run(engine.connect())
    engine.take_metrics()
    return engine


def one(engine, prompt=(3, 4, 5), **sampling):
    return asyncio.run(
        engine.generate(list(prompt), Sampling(**{"temperature": 1.0, "max_tokens": 6} | sampling), seed=7)
    )


class Learner:
    version = 0

    def __init__(self, model):
        self.model = model

    def named_weights(self):
        yield from self.model.state_dict().items()


def test_a_completion_has_what_the_server_sent(fake, models):
    engine = connected(fake)
    done = one(engine, top_logprobs=3)
    check_completion(done, [3, 4, 5], RULES, "sample")
    assert torch.equal(done.routing.ids, torch.from_numpy(routes_of([3, 4, 5, *done.token_ids.tolist()])[:-1]))
    assert [(s.start, s.length, s.source) for s in done.routing.spans] == [(0, 3, "prefill"), (3, 5, "decode")]
    table = models[0][1].state_dict()["model.embed_tokens.weight"]
    fed = torch.tensor([5, *done.token_ids.tolist()])[:-1]
    logp = torch.log_softmax(table[fed] @ table.T, -1)
    torch.testing.assert_close(done.logp, logp.gather(-1, done.token_ids.long()[:, None])[:, 0], atol=1e-5, rtol=0)
    top = logp.topk(3)
    assert torch.equal(done.top_ids, top.indices.int())
    torch.testing.assert_close(done.top_logp, top.values, atol=1e-5, rtol=0)
    assert one(engine, stop=(int(done.token_ids[2]),)).finish == "stop"


def spoiled_logp(reply, value):
    content = json.loads(json.dumps(reply["choices"][0]["logprobs"]["content"]))
    content[1]["logprob"] = value
    return {"content": content}


def malformed():
    rows = routes_of(range(8))
    yield "no choices", lambda reply: {"usage": reply["usage"]}, "choices: expected list"
    yield "no tokens", lambda reply: edited(reply, token_ids=None), "token_ids: expected list"
    yield "a token too many", lambda reply: edited(reply, token_ids=[1] * 7), "logprobs: 6 for 7 tokens"
    yield "a token outside", lambda reply: edited(reply, token_ids=[1, 2, 3, 4, 5, 32]), "'32' is no token id in 0..31"
    yield "another token's", lambda reply: edited(reply, token_ids=[0] * 5 + [1]), "logprobs: of token"
    yield "NaN", lambda reply: edited(reply, logprobs=spoiled_logp(reply, float("nan"))), "nan is no log-prob"
    yield "no value", lambda reply: edited(reply, logprobs=spoiled_logp(reply, -9999.0)), "has none"
    yield "a logit", lambda reply: edited(reply, logprobs=spoiled_logp(reply, 3.5)), "3.5 is no log-probability"
    yield "stopped early", lambda reply: edited(reply, finish_reason="stop"), "finish_reason: 'stop' after 6 of 6"
    yield "no routes", lambda reply: edited(reply, routed_experts=None), "returned no routes"
    yield "bad base64", lambda reply: edited(reply, routed_experts="k05V*" * 40), "base64"
    yield "half an array", lambda reply: edited(reply, routed_experts=npy(rows)[:120]), "expected base64 of an .npy"
    yield "a row missing", lambda reply: edited(reply, routed_experts=npy(rows[:-1])), "8 rows were due"
    yield "two dimensions", lambda reply: edited(reply, routed_experts=npy(rows[:, 0])), "shape"
    yield "a layer missing", lambda reply: edited(reply, routed_experts=npy(rows[:, :2])), "routes have 2 layers"
    yield "floats", lambda reply: edited(reply, routed_experts=npy(rows.astype(np.float32))), "integers"
    yield "an expert outside", lambda reply: edited(reply, routed_experts=npy(rows + 16)), "outside 0..15"
    yield "all zeros", lambda reply: edited(reply, routed_experts=npy(rows * 0)), "zeros for all routes"
    yield "pickled", lambda reply: edited(reply, routed_experts=npy(np.array([Bomb()], dtype=object))), "allow_pickle"
    yield "a huge header", lambda reply: edited(reply, routed_experts=huge()), "expected base64 of an .npy"
    yield "not JSON", lambda reply: Reply(b'{"choices": [{"ind'), "not JSON"
    yield "cut off", lambda reply: Reply(reply, cut=20), "RemoteProtocolError"
    yield "nobody", lambda reply: Reply(hang_up=True), "RemoteProtocolError"
    yield "5xx", lambda reply: Reply({"error": "engine core died"}, 500), "status 500.*engine core died"


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled what a server sent",)


def huge():
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999, 3, 4), }".ljust(127)
        + b"\n"
    )
    return base64.b64encode(header).decode()


@pytest.mark.parametrize(("name", "spoil", "message"), [pytest.param(*case, id=case[0]) for case in malformed()])
def test_a_bad_reply_is_asked_for_again_and_then_ends_the_run(steady, name, spoil, message):
    fake, engine = steady
    fake.spoil.clear()
    good = one(engine)
    engine.take_metrics()
    begun = fake._numbers["POST " + GENERATE]
    fake.spoil[GENERATE] = lambda reply, number: spoil(reply) if number - begun <= 2 else reply
    again = one(engine)
    assert torch.equal(good.token_ids, again.token_ids)
    assert torch.equal(good.routing.ids, again.routing.ids)
    assert engine.take_metrics()["rollout/requests_retried"] == 2
    fake.spoil[GENERATE] = lambda reply, number: spoil(reply)
    with pytest.raises(TrainingError, match=message):
        one(engine)
    counted = engine.take_metrics()
    assert (counted["rollout/requests_dropped"], counted["rollout/requests_retried"]) == (1, 2)


def test_unpickling_would_have_been_noticed():
    with pytest.raises(BaseException, match="unpickled what a server sent"):
        pickle.loads(pickle.dumps(Bomb()))


def test_time_out_and_a_server_that_dies_in_the_middle_of_a_batch(fake):
    engine = connected(fake, timeout_s=0.3, retries=1)
    fake.seconds_per_token = 0.1
    with pytest.raises(TrainingError, match=r"2 times; got no answer within 0.3 s"):
        one(engine)
    fake.seconds_per_token = 0.0
    begun = fake._numbers["POST " + GENERATE]
    fake.spoil[GENERATE] = lambda reply, number: Reply(hang_up=True) if number - begun in (3, 7) else reply

    async def batch():
        return await asyncio.gather(*(engine.generate([i], Sampling(1.0, 3), seed=i) for i in range(16)))

    assert len(asyncio.run(batch())) == 16  # two of them after a retry
    fake.server.__exit__()
    with pytest.raises(TrainingError, match=r"/generate, 2 times; got ConnectError.*--resume"):
        asyncio.run(batch())
    fake.server.__exit__ = lambda *_: None


def test_a_restarted_server_is_noticed_by_the_request_that_bridged_it(fake, models):
    engine = connected(fake)
    asyncio.run(engine.load_weights(models[1][1].state_dict().items(), 1))

    def restart(reply, number):
        fake.weights = "default"
        fake.spoil.clear()
        return Reply(hang_up=True)

    fake.spoil[GENERATE] = restart
    with pytest.raises(TrainingError, match=r"holds weights 'default', not this run's 'onepolicy-.*-1'.*restarted"):
        one(engine)


def test_nobody_unmanaged_and_unextended_servers_are_refused(fake):
    nobody = engine_of(fake, url="http://127.0.0.1:9", retries=0)
    with pytest.raises(UsageError, match=r"ConnectError.*Is the vLLM server running there"), nobody.client.starting():
        asyncio.run(nobody.connect())
    del fake.server.handlers["POST /pause"]
    with pytest.raises(UsageError, match=r"/pause; got status 404.*engine serve"):
        connected(fake)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"shape": {"vocab_size": 99}}, "another model: its hidden_size is None, model.path's 8"),
        ({"shape": shape_of(HF) | {"num_experts": 8}}, "num_experts is 8, model.path's 16"),
        ({"dtype": "bfloat16"}, "rollout.engine.dtype: float32, but the server runs bfloat16"),
        ({"quantization": "fp8"}, "quantised by fp8"),
        ({"max_len": 64}, "max_len: 96, but the server takes 64"),
        ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs"),
        ({"routes": False}, "does not return routes"),
        ({"deployment": {"version": [0, 30], "platform": "cpu", "pipeline": 2}}, "pipeline stages"),
        ({"max_logprobs": 2}, "returns 1 of the likeliest tokens"),
    ],
)
def test_a_server_that_cannot_be_this_runs_engine_is_refused(fake, told, message):
    fake.told = told
    with pytest.raises(UsageError, match=message):
        connected(fake)


def test_raw_log_probabilities_are_noticed_whatever_the_server_says_of_itself(fake):
    fake.raw = True
    with pytest.raises(UsageError, match=r"nats apart at temperature 1 and .* twice as far"):
        connected(fake)


def test_a_pause_that_was_left_behind_is_lifted(fake):
    fake.paused.set()
    assert len(one(connected(fake)).token_ids) == 6


def test_requests_go_on_after_an_update_and_say_which_weights_sampled_what(fake, models):
    """Interrupted in the middle, held back before they began, and one that reaches the server only after the pause."""
    engine = connected(fake, slots=4)
    asyncio.run(checked_push(Learner(models[0][1]), engine, vocab=VOCAB))
    fake.seconds_per_token, fake.sampled = 0.005, 0
    prompts = [[3, 4, i] for i in range(8)]

    async def interrupted():
        tasks = [asyncio.create_task(engine.generate(p, Sampling(1.0, 40), seed=i)) for i, p in enumerate(prompts)]
        await fake.sampling(20)
        await engine.load_weights(models[1][1].state_dict().items(), 5)
        return await asyncio.gather(*tasks)

    done = asyncio.run(interrupted())
    tables = {v: m.state_dict()["model.embed_tokens.weight"] for v, (_, m) in zip((0, 5), models, strict=True)}
    split = 0
    for prompt, completion in zip(prompts, done, strict=True):
        tokens, versions = completion.token_ids.long(), completion.version
        assert (len(tokens), completion.finish) == (40, "length")
        assert (versions.diff() >= 0).all()
        split += len(versions.unique()) == 2
        fed = torch.cat([torch.tensor(prompt[-1:]), tokens[:-1]])
        for t in range(40):
            table = tables[int(versions[t])]
            logp = torch.log_softmax(table[fed[t]] @ table.T, -1)[tokens[t]]
            torch.testing.assert_close(completion.logp[t], logp, atol=1e-5, rtol=0)
        check_completion(completion, prompt, RULES, "sample")
        assert torch.equal(completion.routing.ids, torch.from_numpy(routes_of([*prompt, *tokens.tolist()])[:-1]))
        kept = int((versions == 0).sum())
        spans = completion.routing.spans
        assert sum(s.length for s in spans if s.version == 0) == (2 + kept if kept else 0)  # its last token was not fed
        assert sum(s.length for s in spans) == 42
    assert split >= 4
    assert engine.take_metrics()["rollout/requests_resumed"] >= 4
    seeds = {r.body["sampling_params"]["seed"] for r in fake.server.asked if r.path == GENERATE and r.params == {}}
    assert {continued(0, int((done[0].version == 0).sum())), 0} <= seeds


def test_what_is_on_its_way_while_the_server_pauses_is_not_left_waiting(fake, models):
    """The pause reaches the server before the request does, which would wait there for the new weights."""
    engine = connected(fake)

    async def late():
        fake.paused.set()  # as if the pause below had overtaken it
        task = asyncio.create_task(engine.generate([3], Sampling(1.0, 5), seed=0))
        await asyncio.sleep(0.05)
        assert not task.done()
        await engine.load_weights(models[1][1].state_dict().items(), 2)
        return await task

    assert (asyncio.run(late()).version == 2).all()


def test_an_abort_of_somebody_else_is_a_partial_answer(fake):
    engine = connected(fake)
    fake.seconds_per_token, fake.sampled = 0.02, 0

    async def aborted():
        task = asyncio.create_task(engine.generate([3], Sampling(1.0, 80), seed=0))
        await fake.sampling(3)
        fake.aborts += 1
        return await task

    done = asyncio.run(aborted())
    assert done.finish == "aborted"
    assert 0 < len(done.token_ids) < 80
    check_completion(done, [3], RULES, "sample")


def test_only_abort_keeps_versions_apart(fake):
    with pytest.raises(UsageError, match="mode keep"):
        asyncio.run(connected(fake).pause("keep"))


def test_a_failed_update_leaves_no_engine_behind(fake, models):
    engine = connected(fake, retries=0)
    fake.spoil["/collective_rpc"] = lambda reply, number: Reply({"error": "out of memory"}, 500)
    with pytest.raises(TrainingError, match="out of memory"):
        asyncio.run(engine.load_weights(models[1][1].state_dict().items(), 1))
    with pytest.raises(RuntimeError, match="failed half-way"):
        one(engine)
    assert fake.paused.is_set()


def test_a_server_serves_one_run_after_another(fake, models):
    """Another model.path: its own weights are reloaded first, and compared with what they answered at the start."""
    engine = connected(fake)
    asyncio.run(adopt(engine, fake.model, vocab=VOCAB))
    assert fake.weights == "default"  # nothing had to be loaded
    asyncio.run(engine.load_weights(models[1][1].state_dict().items(), 9))
    second = connected(fake)
    asyncio.run(adopt(second, fake.model, vocab=VOCAB))
    assert torch.equal(one(second).logp, one(connected(fake)).logp)
    asyncio.run(adopt(connected(fake), models[1][0], vocab=VOCAB))
    assert np.array_equal(fake.table, models[1][1].state_dict()["model.embed_tokens.weight"].numpy())


def test_a_reload_that_is_wrong_every_time_is_noticed(fake, models):
    asyncio.run(adopt(connected(fake), fake.model, vocab=VOCAB))
    fake.spoil["/collective_rpc"] = lambda reply, number: setattr(fake, "table", fake.table * 1.5) or reply
    with pytest.raises(UsageError, match="its weights are wrong after a reload"):
        asyncio.run(adopt(connected(fake), models[1][0], vocab=VOCAB))
    with pytest.raises(TrainingError, match="moved the log-probabilities"):
        asyncio.run(checked_push(Learner(models[1][1]), connected(fake), vocab=VOCAB))


def test_weights_of_another_program_cannot_be_checked(fake, models):
    fake.weights = "somebody-3"
    with pytest.raises(UsageError, match="holds weights 'somebody-3', which another program gave it"):
        asyncio.run(adopt(connected(fake), fake.model, vocab=VOCAB))
