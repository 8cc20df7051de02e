"""vLLM itself behind the RolloutEngine protocol. One engine per session."""

import asyncio
import dataclasses
import functools
import shutil

import numpy as np
import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.config.policy import PolicyConfig
from onepolicy.envs.warmup.examples import task_alphabet
from onepolicy.rollout.vllm import weights as vllm_weights
from onepolicy.rollout.vllm.engine import _VLLMBatch
from onepolicy.rollout.vllm.start import has_monolithic_kernel
from onepolicy.sync.push import checked_push
from onepolicy.tiny.model import make_model, make_tokenizer, save_policy
from onepolicy.types import Sampling
from support.vllm_engines import (
    BLOCK,
    VOCAB,
    FakeLearner,
    cached_requests,
    check_follows,
    check_supports_of,
    followed,
    picked,
    play,
    prompts,
    ragged,
    rows,
    stock,
)

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logp_and_routes_are_those_of_the_tokens(engine, models, temperature):
    """In float32 on both sides, log-probabilities are those of the tempered distribution, and
    routes agree row for row and layer for layer."""
    for (prompt, _, _), done in check_follows(engine, models[0], temperature, count=8):
        sampled = len(done.token_ids)
        assert done.routing.ids.shape == (len(prompt) + sampled - 1, 3, 4)
        spans = [("prefill", 0, len(prompt)), ("decode", len(prompt), sampled - 1)]
        assert [(s.source, s.start, s.length) for s in done.routing.spans] == spans


def test_top_logprobs_of_those_who_ask(engine, models):
    asked = [(3, 0, VOCAB)[i % 3] for i in range(6)]
    requests = [(p, Sampling(0.5, 8, top_logprobs=asked[i]), i) for i, p in enumerate(prompts(6))]
    assert engine.caps.top_logprobs == VOCAB
    close = functools.partial(torch.testing.assert_close, atol=5e-4, rtol=0)
    for number, (prompt, _, _), done in zip(asked, requests, play(engine, requests), strict=True):
        if not number:
            assert (done.top_ids, done.top_logp) == (None, None)
            continue
        logp = torch.log_softmax(stock(models[0], prompt, done.token_ids)[0] / 0.5, -1)
        assert (done.top_ids.dtype, done.top_ids.shape) == (torch.int32, (8, number))
        close(done.top_logp, logp.topk(number).values)
        close(done.top_logp, logp.gather(-1, done.top_ids.long()))
        close(done.logp, picked(logp, done.token_ids))


def test_narrowed_and_greedy_sampling_return_their_logp(engine, models):
    prompt = prompts(1)[0]
    (done,) = play(engine, [(prompt, Sampling(1.0, 20, top_k=2), 3)])
    logits, _ = stock(models[0], prompt, done.token_ids)
    best = logits.topk(2)
    assert (best.indices == done.token_ids.long()[:, None]).any(-1).all()
    narrowed = logits.masked_fill(logits < best.values[:, -1:], float("-inf"))
    expected = picked(narrowed, done.token_ids)
    torch.testing.assert_close(done.logp, expected, atol=2e-4, rtol=0)
    # only the likeliest token is left
    (nucleus,) = play(engine, [(prompt, Sampling(1.0, 20, top_p=1e-6), 3)])
    (greedy,) = play(engine, [(prompt, Sampling(0.0, 20), 9)])
    assert torch.equal(nucleus.token_ids, greedy.token_ids)
    assert (nucleus.logp == 0).all()
    logits, _ = stock(models[0], prompt, greedy.token_ids)
    assert torch.equal(logits.argmax(-1), greedy.token_ids.long())
    likeliest = torch.log_softmax(logits, -1).amax(-1)
    torch.testing.assert_close(greedy.logp, likeliest, atol=2e-4, rtol=0)


def test_supports_are_the_trainers_own_sets(engine, models):
    check_supports_of(functools.partial(play, engine), models[0])


def test_tokens_follow_from_the_seed_alone(engine):
    requests = ragged(prompts(6))
    together = play(engine, requests)
    for request, done in zip(requests, together, strict=True):
        (alone,) = play(engine, [request])
        assert torch.equal(alone.token_ids, done.token_ids)
    prompt, sampling = requests[5][:2]
    siblings = play(engine, [(prompt, sampling, seed) for seed in range(4)])
    assert len({tuple(s.token_ids.tolist()) for s in siblings}) == 4


def test_more_prompt_tokens_than_one_step_takes(engine):
    """vLLM 0.30.0 cannot split a seeded prompt over two steps on the CPU ("CPU Generator does not
    use offset")."""
    budget = engine.llm.vllm_config.scheduler_config.max_num_batched_tokens
    paths = [[2 + i % 30, *prompts(1, seed=i)[0], *[3] * 60] for i in range(64)]
    assert sum(map(len, paths)) > budget
    done = play(engine, [(path, Sampling(1.0, 2), i) for i, path in enumerate(paths)])
    assert all(len(d.routing) == len(path) + 1 for d, path in zip(done, paths, strict=True))


def test_stop_token_ends_and_is_kept(engine):
    prompt = prompts(1)[0]
    (whole,) = play(engine, [(prompt, Sampling(1.0, 30), 5)])
    stop = int(whole.token_ids[7])
    first = whole.token_ids.tolist().index(stop)
    (cut,) = play(engine, [(prompt, Sampling(1.0, 30, stop=(stop,)), 5)])
    assert (cut.token_ids.tolist(), cut.finish) == (whole.token_ids[: first + 1].tolist(), "stop")
    assert len(cut.routing) == len(prompt) + first


def test_prefix_cache_keeps_routes_until_the_weights_change(engine, models):
    """The second of two prompts longer than a block reads keys and routes of the first, and its
    spans show it."""
    prompt = prompts(1)[0] * 40
    request = (prompt[: 2 * BLOCK + 5], Sampling(1.0, 10), 0)
    ((first,), (again,)) = play(engine, [request]), play(engine, [request])
    assert first.routing.spans[0].source == "prefill"
    assert (again.routing.spans[0].source, again.routing.spans[0].length) == ("cache", 2 * BLOCK)
    assert torch.equal(first.routing.ids, again.routing.ids)
    asyncio.run(engine.load_weights(models[1].state_dict().items(), 7))
    (other,) = play(engine, [request])
    assert other.routing.spans[0].source == "prefill"
    assert not torch.equal(other.routing.ids[: 2 * BLOCK], first.routing.ids[: 2 * BLOCK])


def test_only_the_routes_asked_for_are_returned(engine):
    prompt = prompts(1)[0]
    ((whole,), (part,)) = (
        play(engine, [(prompt, Sampling(1.0, 6, routes_from=first), 0)]) for first in (0, 7)
    )
    assert (part.first_slot, len(part.routing)) == (7, len(whole.routing) - 7)
    assert torch.equal(part.routing.ids, whole.routing.ids[7:])


def test_warm_up_finds_routes_that_are_all_zeros(engine):
    batch = engine._runner.batch
    zeros, text = np.zeros((3, 3, 4), np.uint8), engine.llm.model_config.hf_text_config
    broken = dataclasses.replace(batch._payload_format, read_output=lambda output: zeros)
    with pytest.raises(UsageError, match=r"no MoE kernel was captured .*issues/54730"):
        _VLLMBatch(engine.llm, batch._loaded, batch._route_spec, broken, text).warm_up([3, 4, 5])
    assert engine.llm.get_num_unfinished_requests() == 0


def test_kernels_say_whether_they_are_monolithic(engine):
    """rollout/vllm/start.py asks this of every MoE layer."""
    modules = engine.llm.apply_model(lambda model: model)[0].modules()
    methods = [getattr(module, "quant_method", None) for module in modules]
    found = [method.is_monolithic for method in methods if hasattr(method, "is_monolithic")]
    assert found == [False] * 3
    assert engine.llm.apply_model(has_monolithic_kernel) == [False]


def test_threads_are_still_torchs(engine):
    """vLLM's worker replaces torch.set_num_threads by a function that does nothing."""
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_after_every_sync_it_equals_a_fresh_engine(engine, models, fresh):
    """This holds also where the version before left packed experts and cached prefixes."""
    requests = cached_requests()
    for version, index in enumerate((1, 1, 0, 1), start=1):
        asyncio.run(engine.load_weights(models[index].state_dict().items(), version))
        followed(engine, fresh, index, version, requests)


def test_the_check_of_the_first_sync_catches_vllms_own_reload(engine, models, monkeypatch):
    asyncio.run(checked_push(FakeLearner(models[0]), engine, vocab=VOCAB))
    monkeypatch.setattr(vllm_weights, "pack_experts", lambda model: None)
    with pytest.raises(
        RuntimeError, match=r"VLLMEngine .* moved the log-probabilities .*without a sync: 0\)"
    ):
        asyncio.run(checked_push(FakeLearner(models[0]), engine, vocab=VOCAB))


def test_after_a_failed_update_it_answers_nothing_until_a_complete_one(engine, models, fresh):
    """vLLM keeps the tensors of a reload that failed and counts them towards the next reload."""
    weights = dict(models[0].state_dict())
    names = list(weights)
    for left in (0, 1, len(names) // 2, len(names) - 1):
        some = {name: weights[name] for name in names if name != names[left]}
        with pytest.raises(UsageError, match=rf"1 tensors are missing, first '{names[left]}'"):
            asyncio.run(engine.load_weights(some.items(), 3))
        assert engine.version == -1
        with pytest.raises(RuntimeError, match="failed half-way"):
            play(engine, ragged(prompts(1)))
        broken = [*list(weights.items())[:left], ("nonsense", torch.zeros(1))]
        with pytest.raises(UsageError, match="'nonsense' is not a tensor"):
            asyncio.run(engine.load_weights(broken, 3))
        asyncio.run(engine.load_weights(models[1].state_dict().items(), left))
        followed(engine, fresh, 1, left, ragged(prompts(3)))


def test_cancelled_request_is_aborted(engine):
    async def cancel():
        task = asyncio.create_task(engine.generate([3, 4, 5], Sampling(1.0, 80), seed=0))
        other = asyncio.create_task(engine.generate([3, 4, 5], Sampling(1.0, 4), seed=1))
        done = await other  # the engine samples a token of each at a time
        task.cancel()
        assert len(done.token_ids) == 4
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.reset_cache()

    asyncio.run(cancel())
    assert engine.llm.get_num_unfinished_requests() == 0


REFUSED = [
    ([], Sampling(1.0, 4), "at least one token"),
    ([VOCAB], Sampling(1.0, 4), r"0\.\.31"),
    ([3] * 90, Sampling(1.0, 10), "exceed max_len 96"),
    ([3], Sampling(0.001, 4), r"raises 0.001 to 0.01"),
]


def test_requests_vllm_would_change_are_refused(engine, subtests):
    for prompt, sampling, words in REFUSED:
        with subtests.test(words), pytest.raises(UsageError, match=words):
            play(engine, [(prompt, sampling, 0)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of two steps of an untrained policy: the sync check, R3, the detector, an
    evaluation and a checkpoint."""
    folder = tmp_path_factory.mktemp("trained")
    size = {"hidden_size": 64, "layers": 3, "experts": 16, "top_k": 4, "max_len": 128}
    settings = PolicyConfig(**size)
    tokenizer = make_tokenizer(task_alphabet(settings.task))
    save_policy(make_model(settings, len(tokenizer)), tokenizer, settings, folder / "policy")
    (folder / "recipe.toml").write_text(
        f"""
        out = "{folder / "run"}"
        steps = 2
        model = {{ path = "{folder / "policy"}" }}
        task = {{ kind = "chain", ops = 2 }}
        optim = {{ lr = 1e-3 }}
        eval = {{ every = 2, problems = 4, k = 1 }}
        log = {{ counterfactual_every = 1, tensorboard = false, report = false }}
        [rollout]
        prompts_per_step = 2
        group_size = 4
        sampling = {{ max_tokens = 20 }}
        engine = {{ kind = "vllm", max_num_seqs = 8, kv_cache_gib = 0.125 }}
        """
    )
    assert main(["train", str(folder / "recipe.toml")]) == 0
    return folder


def check_replayed(folder, count):
    steps = [row for row in rows(folder) if "mismatch/k3" in row]
    assert len(steps) == count
    for row in steps:
        assert row["mismatch/k3"] < 1e-3
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0


@pytest.mark.smoke
@pytest.mark.process  # vLLM looks at an architecture that it has not seen in one of its own
def test_a_run_trains_with_replayed_routes(trained):
    check_replayed(trained, 2)


@pytest.mark.process
def test_a_resumed_run_loads_its_checkpoint(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    assert main(["train", "--resume", str(tmp_path / "run"), "steps=3"]) == 0
    check_replayed(tmp_path, 3)
