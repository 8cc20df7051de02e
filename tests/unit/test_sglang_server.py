"""SGLangEngine against a strict server of its contract: what it returns, how weights get there, what it refuses."""

import asyncio
import base64

import numpy as np
import pytest
import torch
from http_support import Reply
from safetensors.torch import load_file
from sglang_support import EXPERTS, LAYERS, TOP_K, VOCAB, FakeSGLang
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from onepolicy.config import ModelConfig, SGLangConfig, TrainingError, UsageError, resolve
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteRules, check_completion
from onepolicy.rollout import http
from onepolicy.rollout.sglang import weights
from onepolicy.rollout.sglang.engine import SGLangEngine
from onepolicy.sync.check import adopt
from onepolicy.types import Sampling

RULES = RouteRules((1, 2), EXPERTS, TOP_K, "error")
PROMPT = [5, 9, 3, 20]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two models of one shape, and the folder of each."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=LAYERS,
                mlp_only_layers=[0],
                num_experts=EXPERTS,
                num_experts_per_tok=TOP_K,
                moe_intermediate_size=8,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=256,
                initializer_range=0.5,
                eos_token_id=1,
            )
        )
        folder = tmp_path_factory.mktemp("models") / f"model{seed}"
        model.save_pretrained(folder)
        made.append((model, str(folder)))
    return made


@pytest.fixture
def fake(models):
    with FakeSGLang(models[0][1]) as server:
        yield server


@pytest.fixture(scope="module")
def connected(models):
    with FakeSGLang(models[0][1]) as server:
        yield server, open_engine(server)


@pytest.fixture
def steady(connected):
    """A server and its engine, for tests that change no weights."""
    connected[0].damage = None
    return connected


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.01)


def open_engine(fake, routes=RULES, connect=True, **settings):
    model = ModelConfig(path=fake.folder)
    config = SGLangConfig(**{"url": fake.url, "dtype": "float32", "retries": 2, "timeout_s": 10} | settings)
    engine = SGLangEngine(model, read_config(model), config, routes=routes, max_len=200)
    if connect:
        asyncio.run(engine.connect())
    return engine


def play(engine, *requests):
    """requests: (prompt, sampling), all at once."""

    async def together():
        return await asyncio.gather(*(engine.generate(p, s, seed=i) for i, (p, s) in enumerate(requests)))

    return asyncio.run(together())


def bigram(folder, path, temperature=1.0):
    """Log-probabilities [len(path), V] of the token after each of the path's."""
    tensors = load_file(f"{folder}/model.safetensors")
    logits = tensors["model.embed_tokens.weight"][path] @ tensors["lm_head.weight"].T
    return torch.log_softmax(logits / temperature, -1)


def shifts(folder):
    return int(load_file(f"{folder}/model.safetensors")["lm_head.weight"].sum() * 1000)


def rows(folder, path):
    """Routes [len(path), 2, 2] of a path under one model, MoE layers only."""
    shift = shifts(folder)
    return [[[(t + layer + shift) % EXPERTS, (t + layer + shift + 3) % EXPERTS] for layer in (1, 2)] for t in path]


def spans(done):
    return [(span.source, span.start, span.length, span.version) for span in done.routing.spans]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_completion_carries_tokens_logp_and_the_routes_of_moe_layers(steady, temperature):
    fake, engine = steady
    asyncio.run(engine.reset_cache())
    (done,) = play(engine, (PROMPT, Sampling(temperature, 12, top_logprobs=3)))
    path = PROMPT + done.token_ids.tolist()
    expected = bigram(fake.folder, path, temperature)[3:-1]
    assert torch.allclose(done.logp, expected.gather(-1, done.token_ids.long()[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(done.top_logp, expected.topk(3).values, atol=1e-6)
    assert torch.equal(done.top_ids.long(), expected.topk(3).indices)
    assert (done.finish, done.version.tolist()) == ("length", [0] * 12)
    assert done.routing.ids.tolist() == rows(fake.folder, path[:-1])
    assert done.routing.layers == (1, 2)
    assert done.routing.valid.all()
    assert spans(done) == [("prefill", 0, 4, 0), ("decode", 4, 11, 0)]
    check_completion(done, PROMPT, RULES, "sample")


def test_known_prefix_is_neither_computed_nor_sent_again(steady):
    fake, engine = steady
    asyncio.run(engine.reset_cache())
    (first,) = play(engine, (PROMPT, Sampling(1.0, 5)))
    prompt = PROMPT + first.token_ids.tolist() + [7, 8]
    (done,) = play(engine, (prompt, Sampling(1.0, 3, routes_from=len(prompt) - 3)))
    assert done.first_slot == len(prompt) - 3
    assert done.routing.ids.tolist() == rows(fake.folder, (prompt + done.token_ids.tolist())[len(prompt) - 3 : -1])
    assert spans(done) == [("prefill", 0, 3, 0), ("decode", 3, 2, 0)]
    check_completion(done, prompt, RULES, "sample")
    (again,) = play(engine, (prompt, Sampling(1.0, 2)))
    assert spans(again)[0] == ("cache", 0, len(prompt) - 1, 0)  # the last token is always fed


def test_stops_at_our_tokens_only(fake):
    engine = open_engine(fake)
    fake.eos = int(bigram(fake.folder, PROMPT)[-1].argmax())  # what the model's own config would call its end
    (whole,) = play(engine, (PROMPT, Sampling(0.0, 12)))
    stop = whole.token_ids[4].item()
    (done,) = play(engine, (PROMPT, Sampling(0.0, 12, stop=(stop,))))
    assert done.token_ids.tolist() == whole.token_ids.tolist()[: whole.token_ids.tolist().index(stop) + 1]
    assert done.finish == "stop"
    assert done.routing.ids.tolist() == rows(fake.folder, PROMPT + done.token_ids.tolist()[:-1])
    (cut,) = play(engine, (PROMPT, Sampling(0.0, 1, stop=((fake.eos + 1) % VOCAB,))))
    assert (cut.token_ids.tolist(), cut.finish) == ([fake.eos], "length")


def test_narrowed_sampling_returns_the_narrowed_logp(steady):
    fake, engine = steady
    expected = bigram(fake.folder, PROMPT)[-1]
    few, nucleus, greedy = play(
        engine,
        (PROMPT, Sampling(1.0, 1, top_k=3)),
        (PROMPT, Sampling(1.0, 1, top_p=1e-6)),
        (PROMPT, Sampling(0.0, 1, top_k=3)),
    )
    kept = expected.topk(3)
    assert torch.allclose(few.logp[0], expected[few.token_ids[0]] - kept.values.logsumexp(0), atol=1e-5)
    assert (nucleus.token_ids[0], nucleus.logp[0]) == (kept.indices[0], 0)
    assert torch.allclose(greedy.logp[0], kept.values[0], atol=1e-6)  # of the whole distribution
    with pytest.raises(UsageError, match="top_logprobs: SGLang"):
        play(engine, (PROMPT, Sampling(1.0, 1, top_k=3, top_logprobs=2)))
    with pytest.raises(UsageError, match=r"top_k: SGLang returns .* up to 4096"):
        play(engine, (PROMPT, Sampling(1.0, 1, top_k=5000)))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"version": "0.5.22"}, r"is not SGLang 0\.5\.23"),
        ({"dtype": "bfloat16"}, "server runs bfloat16"),
        ({"quantization": "fp8"}, "quantised by fp8"),
        ({"enable_fp32_lm_head": True}, "lm_head: same, but the server was started with --enable-fp32-lm-head"),
        ({"max_req_input_len": 199}, r"max_len: 200, but the server takes 199"),
        ({"enable_return_routed_experts": False}, "--enable-return-routed-experts"),
        ({"dp_size": 2}, "dp_size 2"),
        ({"pp_size": 2}, "pp_size=2: its routes would be wrong"),
        ({"enable_hierarchical_cache": True}, "issues/26975"),
        ({"disaggregation_mode": "decode"}, "no routes of the prompt"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm=EAGLE"),
    ],
)
def test_server_that_cannot_be_this_runs_engine_is_refused(fake, info, message):
    fake.info = info
    with pytest.raises(UsageError, match=message):
        open_engine(fake)


def test_raw_log_probabilities_are_found_by_asking(fake):
    fake.tempered = False
    with pytest.raises(UsageError, match="does not return the log-probabilities it samples from"):
        open_engine(fake)


def test_another_model_and_an_absent_server_are_refused(models, fake, tmp_path):
    fake.http.handlers["GET /model_info"] = lambda _: {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}
    with pytest.raises(UsageError, match="serves a olmoe"):
        open_engine(fake)
    with pytest.raises(UsageError, match="Is the SGLang server running there"):
        open_engine(fake, url="http://127.0.0.1:9")


@pytest.mark.parametrize("settings", [{"sync": "gloo"}, {"sync": "disk"}])
def test_weights_reach_the_server_whole_and_the_cache_forgets(fake, models, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "BUCKET_BYTES", 5000)  # several broadcasts
    if settings["sync"] == "disk":
        settings |= {"sync_dir": str(tmp_path)}
    engine = open_engine(fake, **settings)
    play(engine, (PROMPT, Sampling(1.0, 2)))
    other, folder = models[1]
    asyncio.run(engine.load_weights(other.state_dict().items(), 7))
    saved = load_file(f"{folder}/model.safetensors")
    assert {name: bool((tensor == fake.weights[name]).all()) for name, tensor in saved.items()} == dict.fromkeys(
        saved, True
    )
    assert engine.version == 7
    assert not fake.cache
    assert not fake.session
    assert not fake.groups
    (done,) = play(engine, (PROMPT, Sampling(1.0, 4)))
    assert done.version.tolist() == [7] * 4
    assert spans(done) == [("prefill", 0, 4, 7), ("decode", 4, 3, 7)]
    assert done.routing.ids.tolist() == rows(folder, PROMPT + done.token_ids.tolist()[:-1])


def updated_under_way(fake, engine, other, sampling, version=3):
    """One request, weights loaded when it has sampled fake.hold tokens."""

    async def both():
        asked = asyncio.create_task(engine.generate(PROMPT, sampling, seed=0))
        while not fake.held:
            await asyncio.sleep(0.005)
        await engine.load_weights(other.state_dict().items(), version)
        return await asked

    return asyncio.run(both())


def test_aborted_request_goes_on_from_its_tokens(fake, models):
    engine = open_engine(fake, pause="abort")
    asyncio.run(engine.reset_cache())
    fake.hold = 4
    done = updated_under_way(fake, engine, models[1][0], Sampling(1.0, 9))
    path = PROMPT + done.token_ids.tolist()
    assert done.version.tolist() == [0] * 4 + [3] * 5
    old, new = rows(models[0][1], path), rows(models[1][1], path)
    assert done.routing.ids.tolist() == old[:7] + new[7:-1]  # slot 7 feeds the fourth token, under the new weights
    assert done.routing.valid.all()
    assert spans(done) == [("prefill", 0, 4, 0), ("decode", 4, 3, 0), ("prefill", 7, 1, 3), ("decode", 8, 4, 3)]
    logp = torch.cat([bigram(models[0][1], path)[3:7], bigram(models[1][1], path)[7:-1]])
    assert torch.allclose(done.logp, logp.gather(-1, done.token_ids.long()[:, None])[:, 0], atol=1e-6)
    assert engine.take_metrics()["rollout/requests_resumed"] == 1


def test_retracted_requests_recomputed_routes_are_not_taken_for_those_that_sampled(fake, models):
    engine = open_engine(fake, pause="retract")
    asyncio.run(engine.reset_cache())
    fake.hold = 4
    done = updated_under_way(fake, engine, models[1][0], Sampling(1.0, 9))
    assert done.version.tolist() == [0] * 4 + [3] * 5
    # slots 3..6 sampled tokens under version 0, but their rows are of version 3
    assert done.routing.valid.tolist() == [True] * 3 + [False] * 4 + [True] * 5
    assert spans(done) == [("prefill", 0, 8, 3), ("decode", 8, 4, 3)]
    new = rows(models[1][1], PROMPT + done.token_ids.tolist())
    assert done.routing.ids[done.routing.valid].tolist() == [new[i] for i in (0, 1, 2, 7, 8, 9, 10, 11)]


def test_request_paused_in_place_keeps_what_it_has(fake, models):
    engine = open_engine(fake, pause="in_place")
    asyncio.run(engine.reset_cache())
    fake.hold = 4
    done = updated_under_way(fake, engine, models[1][0], Sampling(1.0, 9))
    path = PROMPT + done.token_ids.tolist()
    assert done.version.tolist() == [0] * 4 + [3] * 5
    assert done.routing.ids.tolist() == rows(models[0][1], path)[:7] + rows(models[1][1], path)[7:-1]
    assert done.routing.valid.all()
    assert spans(done) == [("prefill", 0, 4, 0), ("decode", 4, 3, 0), ("decode", 7, 5, 3)]
    assert fake.cache  # could not be flushed under a running request
    (later,) = play(engine, (PROMPT, Sampling(1.0, 2)))
    assert spans(later)[0][0] == "prefill"  # but what it holds is not for requests of the new weights


def test_without_requests_in_place_flushes_as_well(fake, models):
    engine = open_engine(fake, pause="in_place")
    play(engine, (PROMPT, Sampling(1.0, 2)))
    asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert not fake.cache


def meta(**changes):
    return lambda reply: {**reply, "meta_info": {**reply["meta_info"], **changes}}


def routed(change):
    def damage(reply):
        found = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4")
        data = base64.b64encode(change(found).tobytes()).decode()
        return meta(routed_experts=data)(reply)

    return damage


def without(name):
    return lambda reply: {**reply, "meta_info": {k: v for k, v in reply["meta_info"].items() if k != name}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("routed_experts"), "no routed_experts with status 200"),
        (routed(lambda ids: ids[:-1]), r"routed_experts has \d+ bytes; 6 rows x 3 decoder layers x 2 experts"),
        (routed(lambda ids: ids.astype("<i8")), "bytes; 6 rows"),
        (routed(lambda ids: ids[6:]), "bytes; 6 rows"),
        (meta(routed_experts="***"), "not base64"),
        (routed(lambda ids: ids + 100), "outside 0..7"),
        (routed(lambda ids: np.roll(ids.reshape(6, 3, 2), 1, 1)), "dense layer 0 has routes"),
        (lambda reply: {**reply, "output_ids": [VOCAB, 1, 2]}, "is it this model's server"),
        (lambda reply: {**reply, "output_ids": reply["output_ids"][:2]}, "do not end where they should"),
        (lambda reply: {**reply, "output_ids": reply["output_ids"][::-1]}, "not those of output_ids"),
        (meta(output_token_logprobs=[]), "not those of output_ids"),
        (meta(prompt_tokens=5), r"counts 5 \+ 3 tokens"),
        (meta(finish_reason={"type": "stopped"}), "finish_reason 'stopped'"),
        (without("finish_reason"), "finish_reason is NoneType"),
        (without("weight_versions"), "weight_versions is NoneType"),
        (meta(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "not this run's"),
        (without("cached_tokens"), "cached_tokens is NoneType"),
        (lambda reply: [reply], "meta_info is NoneType"),
        (lambda reply: Reply(reply, cut=40), "3 times"),
        (lambda reply: Reply(hang_up=True), "3 times"),
        (lambda reply: Reply({"error": "out of memory"}, 500), "status 500"),
    ],
)
def test_damaged_replies_end_in_an_error_that_says_what_is_wrong(steady, damage, message):
    fake, engine = steady
    fake.damage = damage
    with pytest.raises((TrainingError, UsageError), match=message):
        play(engine, (PROMPT, Sampling(1.0, 3)))


def test_log_probabilities_that_are_no_numbers_are_an_error(steady):
    fake, engine = steady
    fake.damage = lambda reply: meta(output_token_logprobs=[[None, token, None] for token in reply["output_ids"]])(
        reply
    )
    with pytest.raises(TrainingError, match="are not numbers"):
        play(engine, (PROMPT, Sampling(1.0, 3)))


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
    engine = open_engine(fake, timeout_s=0.2, retries=1)
    fake.mode = "in_place"  # somebody paused it
    with pytest.raises(TrainingError, match=r"no answer within 0\.2 s"):
        play(engine, (PROMPT, Sampling(1.0, 3)))
    fake.resume({}, None)


def test_requests_that_others_abort_are_repeated_with_a_bound(steady):
    fake, engine = steady
    fake.damage = lambda reply: meta(finish_reason={"type": "abort"})(reply)
    (done,) = play(engine, (PROMPT, Sampling(1.0, 3)))  # aborted after its last token: nothing is missing
    assert (len(done.token_ids), done.finish) == (3, "length")
    empty = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "weight_versions": []},
    }
    fake.damage = lambda reply: empty
    with pytest.raises(TrainingError, match="somebody else aborted one of our requests 3 times"):
        play(engine, (PROMPT, Sampling(1.0, 3)))


def test_failed_update_leaves_no_session_and_no_policy(fake, models):
    engine = open_engine(fake)
    fake.weights.pop("lm_head.weight")  # so that it refuses ours
    with pytest.raises(TrainingError, match=r"unknown parameters .*lm_head"):
        asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert fake.mode == "abort"
    assert not fake.session
    with pytest.raises(RuntimeError, match="half-way"):
        play(engine, (PROMPT, Sampling(1.0, 3)))


def test_weights_that_others_gave_are_noticed(fake, models):
    engine = open_engine(fake)
    fake.version = "default"  # as after a restart
    with pytest.raises(TrainingError, match="it was restarted, or another run uses it"):
        asyncio.run(engine.load_weights(models[0][0].state_dict().items(), 1))
    with pytest.raises(TrainingError, match="it was restarted, or another run uses it"):
        play(engine, (PROMPT, Sampling(1.0, 3)))


def test_next_run_finds_what_the_last_one_left(fake, models):
    first = open_engine(fake)
    assert first.holds(fake.folder)
    assert first.first_probe() is None
    asyncio.run(first.remember([-0.5, -1.25]))
    asyncio.run(first.load_weights(models[1][0].state_dict().items(), 4))
    assert not first.holds(fake.folder)
    fake.mode = "abort"  # and it died in the middle of an update
    second = open_engine(fake)
    assert second.first_probe() == [-0.5, -1.25]
    assert not second.holds(fake.folder)
    (done,) = play(second, (PROMPT, Sampling(1.0, 3)))
    assert done.version.tolist() == [4] * 3
    asyncio.run(second.load_folder(None, 0))
    assert torch.equal(fake.weights["lm_head.weight"], models[0][0].lm_head.weight)
    fake.version = "somebody's"
    with pytest.raises(UsageError, match="restart it"):
        open_engine(fake).first_probe()


def test_a_run_starts_from_its_own_checkpoint_whatever_the_server_was_given_before(fake, models):
    before = open_engine(fake)
    asyncio.run(adopt(before, fake.folder, vocab=VOCAB))
    asyncio.run(before.load_weights(models[1][0].state_dict().items(), 4))
    engine = open_engine(fake)
    asyncio.run(adopt(engine, models[1][1], vocab=VOCAB))
    assert torch.equal(fake.weights["lm_head.weight"], models[1][0].lm_head.weight)
    (done,) = play(engine, (PROMPT, Sampling(1.0, 3)))
    assert done.version.tolist() == [0] * 3
    fake.wrong = 0.01  # what it makes of every tensor it loads
    with pytest.raises(UsageError, match="its weights are wrong after a reload"):
        asyncio.run(adopt(open_engine(fake), models[1][1], vocab=VOCAB))


def test_requests_wait_for_a_slot(fake):
    engine = open_engine(fake, slots=2)
    fake.most = 0
    play(engine, *[(PROMPT, Sampling(1.0, 6))] * 8)
    assert fake.most == 2


def test_dense_model_asks_for_no_routes(fake):
    (done,) = play(open_engine(fake, routes=None), (PROMPT, Sampling(1.0, 3)))
    assert done.routing is None
    assert not any("return_routed_experts" in (request.body or {}) for request in fake.http.asked)


def test_seeds_are_honoured_only_by_a_deterministic_server(fake):
    assert not open_engine(fake).caps.seeded
    fake.info = {"enable_deterministic_inference": True}
    assert open_engine(fake).caps.seeded


RUN = {"out": "x", "steps": 1, "model": {"path": "x"}, "task": {"kind": "chain"}, "optim": {"lr": 1e-4}}


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        ({"sync_dir": "/x"}, {}, r"sync_dir: has no effect with rollout\.engine\.sync = gloo"),
        ({}, {"replay": {"mode": "weights"}}, "SGLang does not return"),
        ({"dtype": "float32", "lm_head": "float32"}, {}, "lm_head: float32 has no effect"),
        ({"dtype": "float32"}, {"model": {"path": "x", "dtype": "bfloat16"}}, "reads the checkpoint unrounded"),
    ],
)
def test_settings_that_have_no_effect_are_refused(engine, changes, message):
    resolve(RUN | {"rollout": {"engine": {"kind": "sglang"}}})
    with pytest.raises(ValueError, match=message):
        resolve(RUN | {"rollout": {"engine": {"kind": "sglang"} | engine}} | changes)
