"""The embedded engine against the stock model: log-probabilities, routes, seeds, batching,
errors."""

import asyncio
import itertools

import pytest
import torch

from onepolicy.config import UsageError
from onepolicy.rollout.hf.continuous_batch import ContinuousBatch
from onepolicy.rollout.hf.forward import RowSpan, prefill_chunks
from onepolicy.types import Sampling
from support.engine_runs import build, check_against_stock, prompts, ragged, run
from support.models import CONFIGS, make


def checked(requests, name="qwen3_moe", **settings):
    """Return the completions of these requests, which equal the stock model's."""
    done = run(build(name, **settings), requests)
    check_against_stock(make(name), requests, done)
    return done


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_logp_and_routes_are_the_stock_models(name):
    """There are more requests than rows, ragged prompts and lengths, and windows (8) shorter than
    the sequences."""
    engine = build(name, max_num_seqs=3, return_routes=name != "qwen3_dense")
    assert isinstance(engine.batch, ContinuousBatch)
    requests = ragged(prompts(7))
    done = run(engine, requests)
    assert [len(c.token_ids) for c in done] == [s.max_tokens for _, s, _ in requests]
    check_against_stock(make(name), requests, done)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_rows_are_compacted_in_the_tail(name, monkeypatch):
    engine = build(name, max_num_seqs=8)
    moved = []
    swap = engine.batch.rows.swap_rows
    monkeypatch.setattr(engine.batch.rows, "swap_rows", lambda a, b: (moved.append(a), swap(a, b)))
    requests = [(p, Sampling(1.0, 3 if i < 6 else 14), i) for i, p in enumerate(prompts(8))]
    done = run(engine, requests)
    assert moved
    check_against_stock(make(name), requests, done)


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch):
    monkeypatch.setattr("onepolicy.rollout.hf.forward.MAX_SCORES", 150)
    checked(ragged(prompts(4, 10, 40), spread=12))


def test_chunks_cover_every_span_once_in_order():
    spans = [RowSpan(0, 5, 20000), RowSpan(1, 0, 3), RowSpan(2, 0, 4000), RowSpan(3, 2, 9)]
    parts = list(prefill_chunks(spans))
    assert len(parts) > 3
    for span in spans:
        own = [p for part in parts for p in part if p.row == span.row]
        assert own[0].start == span.start
        assert own[-1].stop == span.stop
        assert all(a.stop == b.start for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_greedy_is_generates_greedy(name):
    """Its log-probabilities are of the untempered distribution."""
    model = make(name)
    model.generation_config.eos_token_id = None
    requests = [(p, Sampling(0.0, 8), 0) for p in prompts(2)]
    for (prompt, _, _), completion in zip(requests, checked(requests, name), strict=True):
        path = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        assert completion.token_ids.tolist() == path[0, len(prompt) :].tolist()


def test_a_seed_decides_in_any_batch():
    paths = prompts(5)
    requests = ragged(paths, spread=12)
    together, single = run(build("qwen3_moe"), requests), build("qwen3_moe", max_num_seqs=1)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = run(single, [request])
        assert alone.token_ids.tolist() == expected.token_ids.tolist()
    repeated = [(paths[0], Sampling(1.0, 30), seed) for seed in (1, 1, 2)]
    one, same, other = run(build("qwen3_moe"), repeated)
    assert torch.equal(one.token_ids, same.token_ids)
    assert not torch.equal(one.token_ids, other.token_ids)


def test_stop_token_ends_and_stays():
    free, stopping = build("qwen3_moe"), build("qwen3_moe")
    (path,) = prompts(1)
    (long,) = run(free, [(path, Sampling(1.0, 30), 3)])
    stop = int(long.token_ids[5])
    first = long.token_ids.tolist().index(stop)
    (short,) = run(stopping, [(path, Sampling(1.0, 30, stop=(stop, 999)), 3)])
    assert short.finish == "stop"
    assert long.finish == "length"
    assert short.token_ids.tolist() == long.token_ids.tolist()[: first + 1]
    assert len(short.routing) == len(path) + first


def test_different_sampling_in_one_batch():
    kinds = [Sampling(1.0, 9), Sampling(0.3, 9, top_k=3), Sampling(0.0, 9)]
    kinds.append(Sampling(1.5, 9, top_p=0.4))
    requests = [(p, s, 7) for p, s in zip(prompts(4), kinds, strict=True)]
    together, single = run(build("qwen3_moe"), requests), build("qwen3_moe", max_num_seqs=1)
    for request, mixed in zip(requests, together, strict=True):
        (alone,) = run(single, [request])
        assert alone.token_ids.tolist() == mixed.token_ids.tolist()
        torch.testing.assert_close(alone.logp, mixed.logp, atol=1e-5, rtol=0)


def test_top_logprobs_only_for_requests_that_ask():
    """Rows are refilled and moved together while some requests ask for the likeliest tokens and
    others do not."""
    kinds = [Sampling(0.7, 2 + i % 9, top_logprobs=(5, 0, 64)[i % 3]) for i in range(12)]
    checked([(p, s, i) for i, (p, s) in enumerate(zip(prompts(12), kinds, strict=True))])


def test_calls_join_a_running_batch():
    """A later call must not wait for the earlier ones to end."""
    engine, ended = build("qwen3_moe", max_num_seqs=2), []

    async def call(name, length):
        await engine.generate([2, 3, 4], Sampling(1.0, length), seed=0)
        ended.append(name)

    async def main():
        long = asyncio.create_task(call("long", 50))
        for _ in range(10):
            await asyncio.sleep(0)
        await call("short", 2)
        await long

    asyncio.run(main())
    assert ended == ["short", "long"]


def test_calls_one_after_the_other():
    """Each call comes as the one before ends, just before the task that ran it ends."""
    engine, turn = build("qwen3_moe"), asyncio.Lock()

    async def call(seed):
        async with turn:
            return await engine.generate([2, 3, 4], Sampling(1.0, 2), seed=seed)

    async def main():
        return await asyncio.wait_for(asyncio.gather(*map(call, range(5))), timeout=60)

    assert len(asyncio.run(main())) == 5


def test_load_weights_changes_the_policy_and_empties_the_cache():
    engine, other = build("qwen3_moe"), make("qwen3_moe", seed=1)
    requests = ragged(prompts(3, 10, 12))
    run(engine, requests)
    asyncio.run(engine.load_weights(other.state_dict().items(), 5))
    assert engine.version == 5
    done = run(engine, requests)
    check_against_stock(other, requests, done)  # stale keys or routes would show here
    assert all((c.version == 5).all() and c.routing.spans[0].source == "prefill" for c in done)
    assert all(span.version == 5 for c in done for span in c.routing.spans)


def test_tied_weights_need_loading_once():
    model = make("qwen3_moe")
    weights = dict(model.state_dict())
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    engine = build("qwen3_moe")
    engine.model.lm_head.weight = engine.model.model.embed_tokens.weight
    del weights["lm_head.weight"]
    asyncio.run(engine.load_weights(weights.items(), 1))


def test_load_weights_refuses():
    engine, weights = build("qwen3_moe"), make("qwen3_moe").state_dict()
    name = next(iter(weights))
    for given, words in (
        (("nonsense", torch.zeros(1)), "nonsense"),
        ((name, torch.zeros(2, 2)), "shape"),
        ((name, weights[name]), "missing"),
    ):
        with pytest.raises(UsageError, match=words):
            asyncio.run(engine.load_weights([given], 1))
    with pytest.raises(RuntimeError, match="half-way"):
        run(engine, [([2, 3], Sampling(1.0, 2), 0)])


def test_errors_reach_every_caller_and_the_engine_recovers(monkeypatch):
    engine = build("qwen3_moe", max_num_seqs=2)
    requests = ragged(prompts(5))

    def broken(*args, **kwargs):
        raise FloatingPointError("broken forward")

    async def gather():
        return await asyncio.gather(
            *(engine.generate(p, s, seed=i) for p, s, i in requests), return_exceptions=True
        )

    with monkeypatch.context() as patch:
        patch.setattr(engine.batch.forward, "model", broken)
        assert all(isinstance(r, FloatingPointError) for r in asyncio.run(gather()))
    check_against_stock(make("qwen3_moe"), requests, run(engine, requests))


def test_a_cancelled_call_frees_its_row():
    engine = build("qwen3_moe", max_num_seqs=1)

    async def main():
        task = asyncio.create_task(engine.generate([2, 3, 4], Sampling(1.0, 60), seed=0))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        return await asyncio.wait_for(engine.generate([5, 6, 7], Sampling(1.0, 3), seed=0), 30)

    assert len(asyncio.run(main()).token_ids) == 3


REFUSED = [
    ([2] * 60, Sampling(1.0, 5), "max_len"),
    ([], Sampling(1.0, 5), "prompt_ids"),
    ([64], Sampling(1.0, 5), "prompt_ids"),
    ([2], Sampling(-1.0, 5), "temperature"),
    ([2], Sampling(float("nan"), 5), "temperature"),
    ([2], Sampling(1.0, 0), "max_tokens"),
    ([2], Sampling(1.0, 5, top_p=0.0), "top_p"),
    ([2], Sampling(1.0, 5, top_k=-1), "top_k"),
    ([2], Sampling(1.0, 5, top_logprobs=65), "top_logprobs: 65, .* at most 64"),
]


def test_bad_requests_are_refused_before_anything_runs(monkeypatch, subtests):
    engine = build("qwen3_moe")
    monkeypatch.setattr(engine.batch.forward, "model", lambda *_, **__: pytest.fail("it ran"))
    for prompt, sampling, words in REFUSED:
        with subtests.test(words=words), pytest.raises(UsageError, match=words):
            run(engine, [(prompt, sampling, 0)])


def test_bad_engines_are_refused():
    with pytest.raises(UsageError, match="max_len"):
        build("qwen3_moe", max_len=1000)
    with pytest.raises(UsageError, match="max_len: 1 is not in 2"):
        build("qwen3_moe", max_len=1)
    assert build("qwen3_moe", max_len=2).caps.max_len == 2
    with pytest.raises(UsageError, match="no Mixture-of-Experts"):
        build("qwen3_dense")
