"""A vLLM server's replies, good and bad, and the engine's reaction to a server that fails or is not
the run's."""

import asyncio
import base64
import itertools
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
)
from support.http_server import Reply


def test_a_completion_has_the_servers_data(fake, checkpoints):
    engine = connected(fake)
    done = one(engine, top_logprobs=3)
    tokens = done.token_ids.tolist()
    check_completion(done, [3, 4, 5], RULES, "sample")
    assert torch.equal(done.routing.ids, torch.from_numpy(routes_of([3, 4, 5, *tokens])[:-1]))
    spans = [(s.start, s.length, s.source) for s in done.routing.spans]
    assert spans == [(0, 3, "prefill"), (3, 5, "decode")]
    table = checkpoints[0][1].state_dict()[TABLE]
    logp = torch.log_softmax(table[[5, *tokens][:-1]] @ table.T, -1)
    picked = logp.gather(-1, done.token_ids.long()[:, None])[:, 0]
    torch.testing.assert_close(done.logp, picked, atol=1e-5, rtol=0)
    top = logp.topk(3)
    assert torch.equal(done.top_ids, top.indices.int())
    torch.testing.assert_close(done.top_logp, top.values, atol=1e-5, rtol=0)
    whole = one(engine, top_logprobs=VOCAB).top_ids
    assert torch.equal(whole, logp.argsort(-1, descending=True).int())
    assert one(engine, stop=(tokens[2],)).finish == "stop"


def field(**fields):
    return lambda reply: edited(reply, **fields)


def logp(value):
    def spoil(reply):
        content = json.loads(json.dumps(reply["choices"][0]["logprobs"]["content"]))
        content[1]["logprob"] = value
        return edited(reply, logprobs={"content": content})

    return spoil


def routes(array):
    return field(routed_experts=npy(array))


def cached(count):
    details = {"prompt_tokens_details": {"cached_tokens": count}}
    return lambda reply: reply | {"usage": reply["usage"] | details}


def always(*args, **kwargs):
    return lambda reply: Reply(*args, **kwargs)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled what a server sent",)


def encoded(data):
    return field(routed_experts=base64.b64encode(data).decode())


SHAPE = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999999, 3, 4), }"
HUGE = (b"\x93NUMPY\x01\x00v\x00" + SHAPE).ljust(127) + b"\n"
ROWS = routes_of(range(8))
NO_ARRAY = "expected base64 of an .npy"
MALFORMED = [
    (lambda reply: {"usage": reply["usage"]}, "choices is missing"),
    (field(token_ids=None), "choices.0.token_ids is missing"),
    (field(token_ids=[1] * 7), "logprobs: 6 for 7 tokens"),
    (field(token_ids=[1, 2, 3, 4, 5, 32]), "'32' is no token id in 0..31"),
    (field(token_ids=[0] * 5 + [1]), "logprobs: of token"),
    (logp(float("nan")), "nan is no log-prob"),
    (logp(-9999.0), "has none"),
    (logp(3.5), "3.5 is no log-probability"),
    (logp(float("-inf")), "no log-probability"),
    (logp(-(10**400)), "no log-probability"),
    (field(finish_reason="stop"), "finish_reason: 'stop' after 6 of 6"),
    (field(routed_experts=None), "returned no routes"),
    (field(routed_experts="k05V*" * 40), "base64"),
    (field(routed_experts=npy(ROWS)[:120]), NO_ARRAY),
    (routes(ROWS[:-1]), "8 rows were due"),
    (routes(ROWS[:, 0]), "shape"),
    (routes(ROWS[:, :2]), "routes have 2 layers"),
    (routes(ROWS.astype(np.float32)), "integers"),
    (routes(ROWS + 16), "outside 0..15"),
    (routes(ROWS * 0), "zeros for all routes"),
    (routes(np.array([Bomb()], dtype=object)), "allow_pickle"),
    (encoded(HUGE), NO_ARRAY),
    (encoded(b"PK\x03\x04" * 9), NO_ARRAY),
    (routes(np.uint8(3)), "shape"),
    (field(routed_experts="é" * 8), NO_ARRAY),
    (routes(ROWS.astype(np.int8) * 0 - 1), "negative"),
    (cached(10**12), "cached_tokens is 1000000000000"),
    (cached(-3), "cached_tokens is -3"),
    (always(b'{"choices":' * 50_000), "not JSON"),
    (always(b'{"choices": [{"ind'), "not JSON"),
    (lambda reply: Reply(reply, cut=20), "RemoteProtocolError"),
    (always(hang_up=True), "RemoteProtocolError"),
    (always({"error": "engine core died"}, 500), "status 500.*engine core died"),
]


def test_a_bad_reply_is_asked_for_again_and_then_ends_the_run(fake, subtests):
    engine = connected(fake, retries=1)
    good = one(engine)
    left = [MALFORMED[0][0]]
    fake.spoil[GENERATE] = lambda reply, _: left.pop()(reply) if left else reply
    again = one(engine)
    assert torch.equal(good.token_ids, again.token_ids)
    assert torch.equal(good.routing.ids, again.routing.ids)
    assert engine.take_metrics()["rollout/requests_retried"] == 1
    for number, (spoil, message) in enumerate(MALFORMED):
        with subtests.test(number=number, message=message):
            fake.spoil[GENERATE] = lambda reply, _, spoil=spoil: spoil(reply)
            with pytest.raises(TrainingError, match=message):
                one(engine)
            counted = engine.take_metrics()
            counts = counted["rollout/requests_dropped"], counted["rollout/requests_retried"]
            assert counts == (1, 1)


def test_unpickling_would_have_been_noticed():
    with pytest.raises(BaseException, match="unpickled what a server sent"):
        pickle.loads(pickle.dumps(Bomb()))


def test_time_out_and_death_in_the_middle_of_a_batch(fake):
    hasty = connected(fake, retries=1)
    hasty.client._timeout_s = 0.2  # only now: the requests of the start must be answered
    fake.paused.set()
    with pytest.raises(TrainingError, match=r"2 times; got no answer within"):
        one(hasty)
    fake.paused.clear()
    engine = connected(fake, retries=2)  # a request may meet both hang-ups
    numbers = itertools.count()
    fake.spoil[GENERATE] = lambda reply, _: (
        Reply(hang_up=True) if next(numbers) in (3, 7) else reply
    )

    async def batch():
        calls = (engine.generate([i], Sampling(1.0, 3), seed=i) for i in range(16))
        return await asyncio.gather(*calls)

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
    held = r"holds weights 'default', not this run's 'onepolicy-.*-1'.*restarted"
    with pytest.raises(TrainingError, match=held):
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
    lacking = {"error": "no attribute 'onepolicy_describe'"}
    fake.spoil["/collective_rpc"] = lambda reply, number: Reply(lacking, 500)
    words = r"no attribute 'onepolicy_describe'.*worker extension.*engine serve"
    with pytest.raises(UsageError, match=words):
        connected(fake)


UNFIT = [
    ({"shape": {"vocab_size": 99}}, "another model: its vocab_size is 99, model.path's 32"),
    ({"shape": model_shape(HF) | {"num_experts": 8}}, "num_experts is 8, model.path's 16"),
    ({"dtype": "bfloat16"}, "rollout.engine.dtype: float32, but the server runs bfloat16"),
    ({"head_dtypes": ["None", "torch.bfloat16"]}, r"lm_head: same, .*'torch\.bfloat16'"),
    ({"quantization": "fp8"}, r"rollout\.quant: unset, .* quantised by fp8"),
    ({"max_len": 64}, "max_len: 96, but the server takes 64"),
    ({"logprobs_mode": "raw_logprobs"}, "returns raw_logprobs"),
    ({"routes": False}, "does not return routes"),
    ({"deployment": {"version": [0, 30], "platform": "cpu", "pipeline": 2}}, "pipeline stages"),
    ({"max_logprobs": 2}, "returns 1 of the most likely tokens"),
]
LIES = {
    "/version": ({"version": "9" * 5000 + ".1"}, r"9\.1: not a released version"),
    "/collective_rpc": ({"results": [{}] * 4097}, "4097 workers, expected 1 to 4096"),
}


def test_a_server_that_does_not_fit_the_run_is_refused(fake, subtests):
    for told, message in UNFIT:
        fake.told = told
        with subtests.test(told=told), pytest.raises(UsageError, match=message):
            connected(fake)
    fake.told = {}
    for path, (reply, message) in LIES.items():
        fake.spoil[path] = lambda *_, reply=reply: reply
        with subtests.test(path), pytest.raises(UsageError, match=message):
            connected(fake, retries=0)
        del fake.spoil[path]
    fake.told = {"dtype": "bfloat16", "head_dtypes": []}
    with pytest.raises(UsageError, match=r"lm_head: float32, .* logits in \[\]"):
        connected(fake, dtype="bfloat16", lm_head="float32")
    fake.told, fake.raw = {}, True  # noticed despite settings
    with pytest.raises(UsageError, match=r"nats apart at temperature 1 and .* twice as far"):
        connected(fake)
