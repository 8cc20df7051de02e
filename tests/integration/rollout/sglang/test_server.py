"""SGLangEngine against a strict server of its contract: its completions, and weights on their way
there."""

import asyncio
import shutil

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.config import UsageError
from onepolicy.replay.checks import check_completion
from onepolicy.rollout.remote.dialects import sglang_weights
from onepolicy.train.checkpoint import write_index
from onepolicy.types import Sampling
from support.fake_sglang import VOCAB, FakeSGLang
from support.http_server import Reply
from support.sglang_engines import (
    PROMPT,
    RULES,
    bigram,
    open_engine,
    play,
    rows,
    spans,
)
from support.waiting import until


def picked(logp, done):
    """Return the log-probabilities of the sampled tokens."""
    return logp.gather(-1, done.token_ids.long()[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_completion_has_tokens_logp_and_routes_of_moe_layers(steady, temperature):
    fake, engine = steady
    asyncio.run(engine.reset_cache())
    (done,) = play(engine, (PROMPT, Sampling(temperature, 12, top_logprobs=3)))
    path = PROMPT + done.token_ids.tolist()
    expected = bigram(fake.folder, path, temperature)[3:-1]
    assert torch.allclose(done.logp, picked(expected, done), atol=1e-6)
    assert torch.allclose(done.top_logp, expected.topk(3).values, atol=1e-6)
    assert torch.equal(done.top_ids.long(), expected.topk(3).indices)
    assert (done.finish, done.version.tolist()) == ("length", [0] * 12)
    assert done.routing.ids.tolist() == rows(fake.folder, path[:-1])
    assert done.routing.layers == (1, 2)
    assert done.routing.valid.all()
    assert spans(done) == [("prefill", 0, 4, 0), ("decode", 4, 11, 0)]
    check_completion(done, PROMPT, RULES, "sample")


def test_a_known_prefix_is_neither_computed_nor_sent_again(steady):
    fake, engine = steady
    asyncio.run(engine.reset_cache())
    (first,) = play(engine, (PROMPT, Sampling(1.0, 5)))
    prompt = PROMPT + first.token_ids.tolist() + [7, 8]
    (done,) = play(engine, (prompt, Sampling(1.0, 3, routes_from=len(prompt) - 3)))
    assert done.first_slot == len(prompt) - 3
    path = prompt + done.token_ids.tolist()
    assert done.routing.ids.tolist() == rows(fake.folder, path[len(prompt) - 3 : -1])
    assert spans(done) == [("prefill", 0, 3, 0), ("decode", 3, 2, 0)]
    check_completion(done, prompt, RULES, "sample")
    (again,) = play(engine, (prompt, Sampling(1.0, 2)))
    assert spans(again)[0] == ("cache", 0, len(prompt) - 1, 0)  # the last token is always fed


def test_stops_at_our_tokens_only(fake):
    engine = open_engine(fake)
    # what the model's own config would call its end
    fake.eos = int(bigram(fake.folder, PROMPT)[-1].argmax())
    (whole,) = play(engine, (PROMPT, Sampling(0.0, 12)))
    tokens = whole.token_ids.tolist()
    (done,) = play(engine, (PROMPT, Sampling(0.0, 12, stop=(tokens[4],))))
    assert done.token_ids.tolist() == tokens[: tokens.index(tokens[4]) + 1]
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
    narrowed = expected[few.token_ids[0]] - kept.values.logsumexp(0)
    assert torch.allclose(few.logp[0], narrowed, atol=1e-5)
    assert few.support is None
    (recorded,) = play(engine, (PROMPT, Sampling(1.0, 1, top_k=3, support=True)))
    assert recorded.support.as_sets() == [sorted(kept.indices.tolist())]
    with pytest.raises(UsageError, match="min_p: SGLang"):
        play(engine, (PROMPT, Sampling(1.0, 1, top_k=3, min_p=0.1)))
    assert (nucleus.token_ids[0], nucleus.logp[0]) == (kept.indices[0], 0)
    assert torch.allclose(greedy.logp[0], kept.values[0], atol=1e-6)  # of the whole distribution
    with pytest.raises(UsageError, match="top_logprobs: SGLang"):
        play(engine, (PROMPT, Sampling(1.0, 1, top_k=3, top_logprobs=2)))
    (whole,) = play(engine, (PROMPT, Sampling(1.0, 1, top_k=5000)))  # above the vocabulary: off
    assert torch.allclose(whole.logp[0], expected[whole.token_ids[0]], atol=1e-5)


@pytest.mark.parametrize(
    ("limit", "fix"), [(2, r"set top_k to 1\.\.2 beside top_p, or start"), (0, "tokens; start")]
)
def test_a_mask_that_does_not_fit_is_refused(models, limit, fix):
    fake = FakeSGLang(models[0][1], info={"sampling_mask_max_tokens": limit})
    said = rf"top_k: SGLang returns .* up to {limit} .*{fix}"
    with fake, pytest.raises(UsageError, match=said):
        play(open_engine(fake), (PROMPT, Sampling(1.0, 1, top_k=3)))


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_weights_reach_the_server_whole_and_empty_the_cache(
    fake, models, sync, tmp_path, monkeypatch
):
    monkeypatch.setattr(sglang_weights, "BUCKET_BYTES", 5000)  # several broadcasts
    engine = open_engine(fake, sync=sync, sync_dir=str(tmp_path))
    play(engine, (PROMPT, Sampling(1.0, 2)))
    other, folder = models[1]
    asyncio.run(engine.load_weights(other.state_dict().items(), 7))
    saved = load_file(f"{folder}/model.safetensors")
    assert all(bool((tensor == fake.weights[name]).all()) for name, tensor in saved.items())
    assert engine.version == 7
    assert not any([fake.cache, fake.session, fake.groups])
    (done,) = play(engine, (PROMPT, Sampling(1.0, 4)))
    assert done.version.tolist() == [7] * 4
    assert spans(done) == [("prefill", 0, 4, 7), ("decode", 4, 3, 7)]
    assert done.routing.ids.tolist() == rows(folder, PROMPT + done.token_ids.tolist()[:-1])


def updated_under_way(fake, models, pause):
    """Load weights when a request has sampled 4 of 9 tokens. Return the engine, the completion, and
    the path's routes under the old and the new weights."""
    engine = open_engine(fake, pause=pause)
    asyncio.run(engine.reset_cache())
    fake.hold = 4

    async def both():
        asked = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 9), seed=0))
        await until(lambda: fake.held)
        await engine.load_weights(models[1][0].state_dict().items(), 3)
        return await asked

    done = asyncio.run(both())
    assert done.version.tolist() == [0] * 4 + [3] * 5
    path = PROMPT + done.token_ids.tolist()
    return engine, done, path, *(rows(folder, path) for _, folder in models)


def test_an_aborted_request_continues_from_its_tokens(fake, models):
    engine, done, path, old, new = updated_under_way(fake, models, "abort")
    # slot 7 feeds the fourth token, under the new weights
    assert done.routing.ids.tolist() == old[:7] + new[7:-1]
    assert done.routing.valid.all()
    before = [("prefill", 0, 4, 0), ("decode", 4, 3, 0)]
    assert spans(done) == [*before, ("prefill", 7, 1, 3), ("decode", 8, 4, 3)]
    logp = torch.cat([bigram(models[0][1], path)[3:7], bigram(models[1][1], path)[7:-1]])
    assert torch.allclose(done.logp, picked(logp, done), atol=1e-6)
    assert engine.take_metrics()["rollout/requests_resumed"] == 1


def test_recomputed_routes_of_retracted_requests_are_not_taken(fake, models):
    _, done, _, _, new = updated_under_way(fake, models, "retract")
    # slots 3..6 sampled tokens under version 0, but their rows are of version 3
    assert done.routing.valid.tolist() == [True] * 3 + [False] * 4 + [True] * 5
    assert spans(done) == [("prefill", 0, 8, 3), ("decode", 8, 4, 3)]
    assert done.routing.ids[done.routing.valid].tolist() == new[:3] + new[7:12]


def test_a_request_paused_in_place_keeps_its_tokens(fake, models):
    engine, done, _, old, new = updated_under_way(fake, models, "in_place")
    assert done.routing.ids.tolist() == old[:7] + new[7:-1]
    assert done.routing.valid.all()
    assert spans(done) == [("prefill", 0, 4, 0), ("decode", 4, 3, 0), ("decode", 7, 5, 3)]
    assert fake.cache  # could not be flushed under a running request
    (later,) = play(engine, (PROMPT, Sampling(1.0, 2)))
    assert spans(later)[0][0] == "prefill"  # what it holds is not for requests of the new weights


@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_without_requests_in_place_flushes_as_well(fake, models, sync, tmp_path):
    engine = open_engine(fake, pause="in_place", sync=sync, sync_dir=str(tmp_path))
    play(engine, (PROMPT, Sampling(1.0, 2)))
    aborted = fake.aborted
    asyncio.run(engine.dialect.store_canary([-0.5]))
    asyncio.run(engine.load_weights(models[1][0].state_dict().items(), 1))
    assert not fake.cache
    assert fake.aborted == aborted  # no request of another client


def test_the_next_run_finds_the_last_ones_weights(fake, models):
    first = open_engine(fake)
    assert first.has_initial_checkpoint(fake.folder)
    assert first.dialect.canary is None
    asyncio.run(first.dialect.store_canary([-0.5, -1.25]))
    asyncio.run(first.load_weights(models[1][0].state_dict().items(), 4))
    assert not first.has_initial_checkpoint(fake.folder)
    fake.mode = "abort"  # and it died in the middle of an update
    second = open_engine(fake)
    assert second.dialect.canary == [-0.5, -1.25]
    assert not second.has_initial_checkpoint(fake.folder)
    (done,) = play(second, (PROMPT, Sampling(1.0, 3)))
    assert done.version.tolist() == [4] * 3
    asyncio.run(second.load_checkpoint(None, 0))
    assert torch.equal(fake.weights["lm_head.weight"], models[0][0].lm_head.weight)
    fake.version = "somebody's"
    with pytest.raises(UsageError, match="restart it"):
        asyncio.run(open_engine(fake).check_reload())


def test_a_first_update_that_was_cut_off_leaves_no_initial_weights(fake, models):
    first = open_engine(fake)
    asyncio.run(first.attach(fake.folder))

    async def interrupted():
        async with first._update(1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())
    assert not open_engine(fake).has_initial_checkpoint(fake.folder)


def test_a_run_starts_from_its_own_checkpoint_on_a_used_server(fake, models):
    before = open_engine(fake)
    asyncio.run(before.attach(fake.folder))
    asyncio.run(before.load_weights(models[1][0].state_dict().items(), 4))
    engine = open_engine(fake)
    asyncio.run(engine.attach(models[1][1]))
    assert torch.equal(fake.weights["lm_head.weight"], models[1][0].lm_head.weight)
    (done,) = play(engine, (PROMPT, Sampling(1.0, 3)))
    assert done.version.tolist() == [0] * 3
    fake.wrong = 0.01  # what it makes of every tensor it loads
    with pytest.raises(UsageError, match="its weights are wrong after a reload"):
        asyncio.run(open_engine(fake).attach(models[1][1]))


def test_a_server_that_does_not_see_a_runs_checkpoint_is_sent_it(fake, models, tmp_path):
    folder = shutil.copytree(models[1][1], tmp_path / "checkpoint")
    write_index(folder)
    load = fake.http.handlers["POST /update_weights_from_disk"]
    refusal = Reply({"success": False, "message": "no such folder"}, 400)
    fake.http.handlers["POST /update_weights_from_disk"] = lambda request: (
        refusal if request.body["model_path"] == str(folder) else load(request)
    )
    asyncio.run(open_engine(fake, connect=False).start(str(folder)))
    assert torch.equal(fake.weights["lm_head.weight"], models[1][0].lm_head.weight)


def test_requests_wait_for_a_slot(fake):
    engine = open_engine(fake, max_num_seqs=2)
    fake.most = 0
    play(engine, *[(PROMPT, Sampling(1.0, 50))] * 6)  # long enough to meet
    assert fake.most <= 2


def test_dense_model_asks_for_no_routes(fake):
    (done,) = play(open_engine(fake, routes=None), (PROMPT, Sampling(1.0, 3)))
    assert done.routing is None
    assert not any("return_routed_experts" in (request.body or {}) for request in fake.http.asked)


def test_seeds_are_honoured_only_by_a_deterministic_server(fake):
    assert not open_engine(fake).caps.seeded
    fake.info = {"enable_deterministic_inference": True}
    assert open_engine(fake).caps.seeded
