"""Families with recurrent state run on the model's own cache, with the same guarantees but no
sharing."""

import pytest
import torch

from onepolicy.rollout.hf.static_batch import StaticBatch
from onepolicy.types import Sampling
from support.engine_runs import check_against_stock, engine_of, prompts, run
from support.recurrent_models import CONFIGS, make


@pytest.mark.parametrize("name", CONFIGS)
def test_logp_and_routes_are_the_stock_models(name):
    engine = engine_of(make(name), max_num_seqs=3)
    assert isinstance(engine.batch, StaticBatch)
    paths = prompts(3, 9, 10) + prompts(3, 5, 6, seed=1) + prompts(3, 9, 10, seed=2)
    requests = [
        (p, Sampling(0.7 if i % 2 else 1.0, 2 + i, top_logprobs=i % 3), i)
        for i, p in enumerate(paths)
    ]
    done = run(engine, requests)
    assert [len(c.token_ids) for c in done] == [s.max_tokens for _, s, _ in requests]
    check_against_stock(make(name), requests, done)
    assert [span.source for span in done[0].routing.spans] == ["prefill", "decode"]


def test_seed_and_stop():
    (path,) = prompts(1, 9, 10)
    long, other = run(
        engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 12), 4), (path, Sampling(1.0, 12), 5)]
    )
    stop = int(long.token_ids[3])
    first = long.token_ids.tolist().index(stop)
    (short,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 12, stop=(stop,)), 4)])
    assert short.finish == "stop"
    assert short.token_ids.tolist() == long.token_ids.tolist()[: first + 1]
    assert other.token_ids.tolist() != long.token_ids.tolist()


def test_only_the_routes_asked_for_are_returned():
    (path,) = prompts(1, 9, 10)
    (whole,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 4), 4)])
    (part,) = run(engine_of(make("lfm2_moe")), [(path, Sampling(1.0, 4, routes_from=8), 4)])
    assert (part.first_slot, part.routing.spans) == (8, whole.routing.rows(8, 12).spans)
    assert torch.equal(part.routing.ids, whole.routing.ids[8:])
