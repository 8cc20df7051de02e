"""Servers that SGLangEngine refuses: of another kind, with damaged replies, failed updates, or
settings without effect."""

import asyncio
import base64

import numpy as np
import pytest

from onepolicy.config import TrainingError, UsageError
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.run.recovery import _ask_any
from onepolicy.types import Sampling
from support import fake_sglang
from support.fake_sglang import VOCAB
from support.http_server import Reply
from support.sglang_engines import PROMPT, open_engine, play

ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}
UNFIT = [
    ({"version": "0.5.22"}, r"is not SGLang 0\.5\.23"),
    ({"dtype": "bfloat16"}, "server runs bfloat16"),
    ({"quantization": "fp8"}, "quantised by fp8"),
    ({"enable_fp32_lm_head": True}, "lm_head: same, but .* with --enable-fp32-lm-head"),
    ({"max_req_input_len": 199}, r"max_len: 200, but the server takes 199"),
    ({"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
    ({"dp_size": 2}, "dp_size=2, and takes broadcast weights only with 1"),
    ({"pp_size": 2}, "pp_size=2: its routes would be wrong"),
    ({"tp_size": 0}, "tp_size is 0, expected 1 or more"),
    ({"tp_size": 10**8}, "tp_size is 100000000, expected 4096 or less"),
    ({"version": "x" * 10**5}, r"characters left out"),
    (ADAPTERS | {"lora_target_modules": "all"}, "lora_target_modules is str, expected list"),
    (ADAPTERS | {"max_lora_rank": -1}, "max_lora_rank is -1, expected 0"),
    ({"enable_hierarchical_cache": True}, "issues/26975"),
    ({"disaggregation_mode": "decode"}, "no routes of the prompt"),
    ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm=EAGLE"),
]


def test_a_server_that_does_not_fit_the_run_is_refused(fake, subtests):
    for info, message in UNFIT:
        fake.info = info
        sync = "disk" if "pp_size" in info else "gloo"
        with subtests.test(info=info), pytest.raises(UsageError, match=message):
            open_engine(fake, sync=sync)
    fake.info = {"max_req_input_len": 200}
    assert open_engine(fake).caps.max_len == 200
    fake.info, fake.tempered = {}, False  # found by asking
    with pytest.raises(UsageError, match="does not return the log-probabilities it samples from"):
        open_engine(fake)


def test_a_server_that_does_not_say_its_sizes_has_one_of_each(fake, monkeypatch):
    said = fake_sglang.SERVER_INFO | {"model_path": fake.folder}
    for name in ("tp_size", "dp_size", "pp_size"):
        del said[name]
    fake.http.handlers["GET /server_info"] = lambda _: said
    assert open_engine(fake, sync="gloo").caps.max_len == 200


def test_another_model_and_an_absent_server_are_refused(models, fake, tmp_path):
    olmoe = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}
    olmoe["weight_version"] = "default"
    fake.http.handlers["GET /model_info"] = lambda _: olmoe
    with pytest.raises(UsageError, match="serves a olmoe"):
        open_engine(fake)
    with pytest.raises(UsageError, match="Is the SGLang server running there"):
        open_engine(fake, url="http://127.0.0.1:9")


def changed(**changes):
    return lambda reply: {**reply, **changes}


def meta(**changes):
    return lambda reply: {**reply, "meta_info": {**reply["meta_info"], **changes}}


def without(name):
    def damage(reply):
        kept = {k: v for k, v in reply["meta_info"].items() if k != name}
        return {**reply, "meta_info": kept}

    return damage


def routed(change):
    def damage(reply):
        found = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4")
        data = base64.b64encode(change(found).tobytes()).decode()
        return meta(routed_experts=data)(reply)

    return damage


def spans(*bounds):
    def damage(reply):
        version = reply["meta_info"]["weight_versions"][0]["version"]
        parts = [{"version": version, "start": start, "end": end} for start, end in bounds]
        return meta(weight_versions=parts)(reply)

    return damage


def versions(*numbers):
    """Let each token be of a version of this run's weights."""

    def damage(reply):
        run, _, canary = reply["meta_info"]["weight_versions"][0]["version"].rsplit(".", 2)
        parts = [
            {"version": f"{run}.{number}.{canary}", "start": i, "end": i + 1}
            for i, number in enumerate(numbers)
        ]
        return meta(weight_versions=parts)(reply)

    return damage


def logps(value):
    def damage(reply):
        entries = [[value, token, None] for token in reply["output_ids"]]
        return meta(output_token_logprobs=entries)(reply)

    return damage


def likeliest(value, token):
    def damage(reply):
        entries = [[value, token, None], [-1.0, 4, None]]
        return meta(output_top_logprobs=[entries for _ in reply["output_ids"]])(reply)

    return damage


NO_LOGP, NO_ID = r"output_top_logprobs.*: .* is no log-prob", r"output_top_logprobs: .* is no token"
DAMAGED = [
    (without("routed_experts"), "no routed_experts with status 200"),
    (routed(lambda ids: ids[:-1]), r"has \d+ bytes; 6 rows x 3 decoder layers x 2 experts"),
    (routed(lambda ids: ids.astype("<i8")), "bytes; 6 rows"),
    (routed(lambda ids: ids[6:]), "bytes; 6 rows"),
    (meta(routed_experts="***"), "not base64"),
    (meta(routed_experts="é" * 8), "not base64"),
    (meta(routed_experts=[1]), "expected base64"),
    (routed(lambda ids: ids + 100), "outside 0..7"),
    (routed(lambda ids: np.roll(ids.reshape(6, 3, 2), 1, 1)), "dense layer 0 has routes"),
    (routed(lambda ids: ids * 0 - 1), "no row was captured"),
    (routed(lambda ids: ids * 0), "an expert twice"),
    (changed(output_ids=[VOCAB, 1, 2]), "is it this model's server"),
    (lambda r: {**r, "output_ids": r["output_ids"][:2]}, "do not end where they should"),
    (lambda r: {**r, "output_ids": r["output_ids"][::-1]}, "not those of output_ids"),
    (meta(output_token_logprobs=[]), "not those of output_ids"),
    (meta(output_token_logprobs=[1, 2, 3]), r"1 is no \[log-probability, token id, text\]"),
    (meta(prompt_tokens=5), r"counts 5 \+ 3 tokens"),
    (meta(prompt_tokens=True), "prompt_tokens is bool"),
    (meta(finish_reason={"type": "stopped"}), "finish_reason: 'stopped'"),
    (without("finish_reason"), "meta_info.finish_reason is missing"),
    (without("weight_versions"), "meta_info.weight_versions is missing"),
    (meta(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "not this run's"),
    (meta(weight_versions=[{"start": 0}]), "weight_versions.0.end is missing"),
    (without("cached_tokens"), "cached_tokens or num_retractions is missing"),
    (lambda reply: [reply], "the reply is list, expected an object"),
    (meta(cached_tokens=10**12), "cached_tokens is 1000000000000, expected 0"),
    (meta(cached_tokens=-3), "cached_tokens is -3, expected 0"),
    (meta(num_retractions=-1), "num_retractions is -1"),
    (meta(num_retractions=10**400), "num_retractions is 1000"),
    (spans((0, 2 * 10**8), (2 * 10**8, 3)), "end is 200000000, expected 0 to 3"),
    (spans((0, 2), (1, 3)), "do not cover 3 tokens"),
    (spans((0, 0), (0, 3)), "do not cover 3 tokens"),
    (spans((0, 3), (3, 3)), "do not cover 3 tokens"),
    (spans(), "do not cover 3 tokens"),
    (versions(0, 0, 999_999_999), "999999999.*', not this run's"),
    (logps(float("nan")), "nan is no log-probability"),
    (logps(float("-inf")), "-inf is no log-probability"),
    (logps(0.5), "0.5 is no log-probability"),
    (logps(-(10**400)), "is no log-probability"),
    (logps("-1"), "'-1' is no log-probability"),
    (logps(True), "True is no log-probability"),
    (logps(None), "are not numbers"),
    (lambda reply: Reply(reply, cut=40), "1 times"),
    (lambda reply: Reply(hang_up=True), "1 times"),
    (lambda reply: Reply({"error": "out of memory"}, 500), "status 500"),
    *((likeliest(x, 3), NO_LOGP) for x in (float("nan"), 0.5, 10**400, None, "-1", True)),
    *((likeliest(-0.5, token), NO_ID) for token in (VOCAB, -1, 2**40)),
]


def test_a_damaged_reply_is_an_error_with_its_reason(fake, subtests):
    engine = open_engine(fake, retries=0)
    for number, (damage, message) in enumerate(DAMAGED):
        top = 2 * (message in (NO_LOGP, NO_ID))
        fake.damage = damage
        refused = pytest.raises((TrainingError, UsageError), match=message)
        with subtests.test(number=number, message=message), refused:
            play(engine, (PROMPT, Sampling(1.0, 3, top_logprobs=top)))


def test_tokens_of_weights_that_were_replaced_are_refused(fake, models):
    """Of weights before the request, or older ones after newer ones."""
    engine = open_engine(fake, retries=0)
    for version in (1, 2, 3):
        asyncio.run(engine.load_weights(models[0][0].state_dict().items(), version))
    for numbers in ((3, 3, 2), (2, 3, 3), (0, 0, 0)):
        fake.damage = versions(*numbers)
        with pytest.raises(TrainingError, match=r"in this order, of .* with version 3"):
            play(engine, (PROMPT, Sampling(1.0, 3)))
    fake.damage = versions(3, 3, 3)
    assert play(engine, (PROMPT, Sampling(1.0, 3)))[0].version.tolist() == [3, 3, 3]


def test_damage_that_passes_is_retried_and_counted(steady):
    fake, engine = steady
    engine.take_metrics()
    damages = [routed(lambda ids: ids[:-1]), lambda reply: Reply(reply, cut=40)]
    fake.damage = lambda reply: damages.pop(0)(reply) if damages else reply
    (done,) = play(engine, (PROMPT, Sampling(1.0, 3)))
    assert len(done.token_ids) == 3
    counted = engine.take_metrics()
    assert (counted["rollout/requests"], counted["rollout/requests_retried"]) == (1, 2)


def test_server_that_hangs_is_given_up(fake):
    engine = open_engine(fake, retries=1)
    engine.client._timeout_s = 0.2  # only now: the requests of the start must be answered
    fake.mode = "in_place"  # somebody paused it
    with pytest.raises(TrainingError, match=r"got no answer within"):
        play(engine, (PROMPT, Sampling(1.0, 3)))
    fake.resume({}, None)


def test_requests_aborted_by_others_are_repeated_within_a_bound(steady):
    fake, engine = steady
    fake.damage = lambda reply: meta(finish_reason={"type": "abort"})(reply)
    (done,) = play(engine, (PROMPT, Sampling(1.0, 3)))  # aborted after its last token
    assert (len(done.token_ids), done.finish) == (3, "length")
    nothing = {"output_token_logprobs": [], "weight_versions": []}
    empty = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, **nothing}}
    fake.damage = lambda reply: empty
    with pytest.raises(TrainingError, match="somebody else aborted one of our requests 3 times"):
        play(engine, (PROMPT, Sampling(1.0, 3)))
    fake.damage = None


def test_a_failed_update_leaves_no_session_and_no_policy(fake, models):
    engine = open_engine(fake)
    fake.weights.pop("lm_head.weight")  # so that it refuses ours
    with pytest.raises(TrainingError, match=r"unknown parameters .*lm_head"):
        asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert fake.mode == "abort"
    assert not fake.session
    with pytest.raises(RuntimeError, match="half-way"):
        play(engine, (PROMPT, Sampling(1.0, 3)))


def test_an_update_that_a_killed_run_left_open_bars_no_other(fake, models):
    fake.session, fake.mode = True, "abort"
    engine = open_engine(fake)
    asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert not fake.session


def test_an_update_whose_beginning_was_not_confirmed_is_ended(fake, models):
    engine = open_engine(fake)
    begin = fake.http.handlers["POST /begin_weight_update"]
    fake.http.handlers["POST /begin_weight_update"] = lambda request: (
        begin(request) and Reply(hang_up=True)
    )
    with pytest.raises(EngineLost, match="/begin_weight_update"):
        asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert not fake.session


def test_a_server_that_a_failed_update_left_paused_is_there(fake):
    """Both a fleet and a resumed run ask before they connect to it, which lifts the pause."""
    engine = open_engine(fake)
    fake.mode = "abort"
    assert asyncio.run(engine.answers())
    asyncio.run(_ask_any([engine.dialect.config]))
    asyncio.run(engine.connect())
    assert fake.mode is None


def test_weights_that_others_gave_are_noticed(fake, models):
    engine = open_engine(fake)
    fake.version = "default"  # as after a restart
    others = "it was restarted, or another run uses it"
    with pytest.raises(TrainingError, match=others):
        asyncio.run(engine.load_weights(models[0][0].state_dict().items(), 1))
    with pytest.raises(TrainingError, match=others):
        play(engine, (PROMPT, Sampling(1.0, 3)))
