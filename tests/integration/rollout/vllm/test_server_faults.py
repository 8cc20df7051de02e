"""A vLLM server's replies, good and bad, and the engine's reaction to a server that fails or is not
the run's."""

import asyncio
import base64
import json
import pickle

import numpy as np
import pytest
import torch

from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.checks import check_completion
from onepolicy.rollout.vllm.worker import model_shape
from onepolicy.types import Sampling
from support.fake_vllm import (
    GENERATE,
    HF,
    RULES,
    TABLE,
    VOCAB,
    connected,
    edited,
    engine_of,
    npy,
    one,
    routes_of,
    serving,
)
from support.http_server import Reply

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture(scope="module")
def steady(checkpoints):
    """Yield a server and an engine that many tests share. The tests leave only the counters
    changed."""
    with serving(checkpoints) as fake:
        yield fake, connected(fake)


def test_a_completion_has_the_servers_data(fake, checkpoints):
    engine = connected(fake)
    done = one(engine, top_logprobs=3)
    check_completion(done, [3, 4, 5], RULES, "sample")
    assert torch.equal(
        done.routing.ids, torch.from_numpy(routes_of([3, 4, 5, *done.token_ids.tolist()])[:-1])
    )
    assert [(s.start, s.length, s.source) for s in done.routing.spans] == [
        (0, 3, "prefill"),
        (3, 5, "decode"),
    ]
    table = checkpoints[0][1].state_dict()[TABLE]
    fed = torch.tensor([5, *done.token_ids.tolist()])[:-1]
    logp = torch.log_softmax(table[fed] @ table.T, -1)
    torch.testing.assert_close(
        done.logp, logp.gather(-1, done.token_ids.long()[:, None])[:, 0], atol=1e-5, rtol=0
    )
    top = logp.topk(3)
    assert torch.equal(done.top_ids, top.indices.int())
    torch.testing.assert_close(done.top_logp, top.values, atol=1e-5, rtol=0)
    assert torch.equal(
        one(engine, top_logprobs=VOCAB).top_ids, logp.argsort(-1, descending=True).int()
    )
    assert one(engine, stop=(int(done.token_ids[2]),)).finish == "stop"


def spoiled_logp(reply, value):
    content = json.loads(json.dumps(reply["choices"][0]["logprobs"]["content"]))
    content[1]["logprob"] = value
    return {"content": content}


def encoded(data):
    return base64.b64encode(data).decode()


def usage(reply, cached):
    return reply["usage"] | {"prompt_tokens_details": {"cached_tokens": cached}}


def malformed():
    rows = routes_of(range(8))
    yield (
        "no choices",
        lambda reply: {"usage": reply["usage"]},
        "choices is NoneType, expected list",
    )
    yield (
        "no tokens",
        lambda reply: edited(reply, token_ids=None),
        "token_ids is NoneType, expected list",
    )
    yield (
        "a token too many",
        lambda reply: edited(reply, token_ids=[1] * 7),
        "logprobs: 6 for 7 tokens",
    )
    yield (
        "a token outside",
        lambda reply: edited(reply, token_ids=[1, 2, 3, 4, 5, 32]),
        "'32' is no token id in 0..31",
    )
    yield (
        "another token's",
        lambda reply: edited(reply, token_ids=[0] * 5 + [1]),
        "logprobs: of token",
    )
    yield (
        "NaN",
        lambda reply: edited(reply, logprobs=spoiled_logp(reply, float("nan"))),
        "nan is no log-prob",
    )
    yield "no value", lambda reply: edited(reply, logprobs=spoiled_logp(reply, -9999.0)), "has none"
    yield (
        "a logit",
        lambda reply: edited(reply, logprobs=spoiled_logp(reply, 3.5)),
        "3.5 is no log-probability",
    )
    yield (
        "stopped early",
        lambda reply: edited(reply, finish_reason="stop"),
        "finish_reason: 'stop' after 6 of 6",
    )
    yield "no routes", lambda reply: edited(reply, routed_experts=None), "returned no routes"
    yield "bad base64", lambda reply: edited(reply, routed_experts="k05V*" * 40), "base64"
    yield (
        "half an array",
        lambda reply: edited(reply, routed_experts=npy(rows)[:120]),
        "expected base64 of an .npy",
    )
    yield (
        "a row missing",
        lambda reply: edited(reply, routed_experts=npy(rows[:-1])),
        "8 rows were due",
    )
    yield "two dimensions", lambda reply: edited(reply, routed_experts=npy(rows[:, 0])), "shape"
    yield (
        "a layer missing",
        lambda reply: edited(reply, routed_experts=npy(rows[:, :2])),
        "routes have 2 layers",
    )
    yield (
        "floats",
        lambda reply: edited(reply, routed_experts=npy(rows.astype(np.float32))),
        "integers",
    )
    yield (
        "an expert outside",
        lambda reply: edited(reply, routed_experts=npy(rows + 16)),
        "outside 0..15",
    )
    yield (
        "all zeros",
        lambda reply: edited(reply, routed_experts=npy(rows * 0)),
        "zeros for all routes",
    )
    yield (
        "pickled",
        lambda reply: edited(reply, routed_experts=npy(np.array([Bomb()], dtype=object))),
        "allow_pickle",
    )
    yield (
        "a huge header",
        lambda reply: edited(reply, routed_experts=huge()),
        "expected base64 of an .npy",
    )
    yield (
        "an archive",
        lambda reply: edited(reply, routed_experts=encoded(b"PK\x03\x04" * 9)),
        "expected base64 of an",
    )
    yield "no dimension", lambda reply: edited(reply, routed_experts=npy(np.uint8(3))), "shape"
    yield (
        "not ASCII",
        lambda reply: edited(reply, routed_experts="é" * 8),
        "expected base64 of an .npy",
    )
    yield (
        "all negative",
        lambda reply: edited(reply, routed_experts=npy(rows.astype(np.int8) * 0 - 1)),
        "negative",
    )
    yield (
        "cached",
        lambda reply: reply | {"usage": usage(reply, 10**12)},
        "cached_tokens is 1000000000000",
    )
    yield "cached less", lambda reply: reply | {"usage": usage(reply, -3)}, "cached_tokens is -3"
    yield (
        "infinite",
        lambda reply: edited(reply, logprobs=spoiled_logp(reply, float("-inf"))),
        "no log-probability",
    )
    yield (
        "digits",
        lambda reply: edited(reply, logprobs=spoiled_logp(reply, -(10**400))),
        "no log-probability",
    )
    yield "a deep reply", lambda reply: Reply(b'{"choices":' * 50_000), "not JSON"
    yield "not JSON", lambda reply: Reply(b'{"choices": [{"ind'), "not JSON"
    yield "cut off", lambda reply: Reply(reply, cut=20), "RemoteProtocolError"
    yield "nobody", lambda reply: Reply(hang_up=True), "RemoteProtocolError"
    yield (
        "5xx",
        lambda reply: Reply({"error": "engine core died"}, 500),
        "status 500.*engine core died",
    )


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled what a server sent",)


def huge():
    header = (
        b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': "
        b"(9999999999999, 3, 4), }".ljust(127)
        + b"\n"
    )
    return base64.b64encode(header).decode()


@pytest.mark.parametrize(
    ("name", "spoil", "message"), [pytest.param(*case, id=case[0]) for case in malformed()]
)
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


def test_time_out_and_death_in_the_middle_of_a_batch(fake):
    hasty = connected(fake, retries=1)
    hasty.client._timeout_s = 0.2  # only now: the requests of the start must be answered
    fake.paused.set()
    with pytest.raises(TrainingError, match=r"2 times; got no answer within 0.2 s"):
        one(hasty)
    fake.paused.clear()
    engine = connected(fake, retries=2)  # a request may meet both hang-ups
    begun = fake._numbers["POST " + GENERATE]
    fake.spoil[GENERATE] = lambda reply, number: (
        Reply(hang_up=True) if number - begun in (3, 7) else reply
    )

    async def batch():
        return await asyncio.gather(
            *(engine.generate([i], Sampling(1.0, 3), seed=i) for i in range(16))
        )

    assert len(asyncio.run(batch())) == 16  # two of them after a retry
    fake.server.__exit__()
    with pytest.raises(TrainingError, match=r"/generate, 3 times; got ConnectError.*--resume"):
        asyncio.run(batch())
    fake.server.__exit__ = lambda *_: None


def test_a_request_across_a_restart_notices_it(fake, checkpoints):
    engine = connected(fake)
    asyncio.run(engine.load_weights(checkpoints[1][1].state_dict().items(), 1))

    def restart(reply, number):
        fake.weights = "default"
        fake.spoil.clear()
        return Reply(hang_up=True)

    fake.spoil[GENERATE] = restart
    with pytest.raises(
        TrainingError, match=r"holds weights 'default', not this run's 'onepolicy-.*-1'.*restarted"
    ):
        one(engine)


def test_absent_unmanaged_and_unextended_servers_are_refused(fake):
    nobody = engine_of(fake, url="http://127.0.0.1:9", retries=0)
    with (
        pytest.raises(UsageError, match=r"ConnectError.*Is the vLLM server running there"),
        nobody.client.startup_errors(),
    ):
        asyncio.run(nobody.connect())
    del fake.server.handlers["POST /pause"]
    with pytest.raises(UsageError, match=r"/pause; got status 404.*engine serve"):
        connected(fake)


def test_a_server_without_our_current_extension_is_refused(fake):
    fake.told = {"colour": "red"}
    with pytest.raises(UsageError, match=r"another version of onepolicy \(.*'colour'"):
        connected(fake)
    fake.spoil["/collective_rpc"] = lambda reply, number: Reply(
        {"error": "no attribute 'onepolicy_describe'"}, 500
    )
    with pytest.raises(
        UsageError, match=r"no attribute 'onepolicy_describe'.*worker extension.*engine serve"
    ):
        connected(fake)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"shape": {"vocab_size": 99}}, "another model: its vocab_size is 99, model.path's 32"),
        ({"shape": model_shape(HF) | {"num_experts": 8}}, "num_experts is 8, model.path's 16"),
        ({"dtype": "bfloat16"}, "rollout.engine.dtype: float32, but the server runs bfloat16"),
        (
            {"quantization": "fp8"},
            r"rollout\.quant: unset, but the server's weights are quantised by fp8",
        ),
        ({"max_len": 64}, "max_len: 96, but the server takes 64"),
        ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs"),
        ({"routes": False}, "does not return routes"),
        ({"deployment": {"version": [0, 30], "platform": "cpu", "pipeline": 2}}, "pipeline stages"),
        ({"max_logprobs": 2}, "returns 1 of the most likely tokens"),
    ],
)
def test_a_server_that_does_not_fit_the_run_is_refused(fake, told, message):
    fake.told = told
    with pytest.raises(UsageError, match=message):
        connected(fake)


def test_raw_log_probabilities_are_noticed_despite_settings(fake):
    fake.raw = True
    with pytest.raises(UsageError, match=r"nats apart at temperature 1 and .* twice as far"):
        connected(fake)
