"""Models that our cache cannot hold run on their own, with the same guarantees but no sharing."""

from collections import deque
from concurrent.futures import Future

import numpy as np
import torch

from onepolicy.rollout.hf.scheduler import SequenceRequest
from onepolicy.rollout.hf.static_batch import StaticBatch
from onepolicy.types import Sampling
from support.engine_runs import check_against_stock, engine_of, prompts, run
from support.models import make as make_model

ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}  # of the batch's longest sequence


def make():
    return make_model("qwen3_moe", rope_parameters=ROPE)


def test_logp_and_routes_are_the_stock_models():
    engine = engine_of(make(), max_num_seqs=3)
    assert isinstance(engine.batch, StaticBatch)
    paths = prompts(3, 9, 10) + prompts(3, 5, 6, seed=1) + prompts(3, 9, 10, seed=2)
    requests = [
        (p, Sampling(0.7 if i % 2 else 1.0, 2 + i, top_logprobs=i % 3), i)
        for i, p in enumerate(paths)
    ]
    done = run(engine, requests)
    assert [len(c.token_ids) for c in done] == [s.max_tokens for _, s, _ in requests]
    check_against_stock(make(), requests, done)
    assert [span.source for span in done[0].routing.spans] == ["prefill", "decode"]


def test_seed_and_stop():
    (path,) = prompts(1, 9, 10)
    long, other = run(
        engine_of(make()), [(path, Sampling(1.0, 12), 4), (path, Sampling(1.0, 12), 5)]
    )
    stop = int(long.token_ids[3])
    first = long.token_ids.tolist().index(stop)
    (short,) = run(engine_of(make()), [(path, Sampling(1.0, 12, stop=(stop,)), 4)])
    assert short.finish == "stop"
    assert short.token_ids.tolist() == long.token_ids.tolist()[: first + 1]
    assert other.token_ids.tolist() != long.token_ids.tolist()


def test_a_batch_is_over_with_its_last_request():
    batch = engine_of(make(), max_num_seqs=3).batch
    tokens = np.array(prompts(1, 9, 10)[0])
    lengths = (2, 4, 4)
    requests = [SequenceRequest(tokens, Sampling(1.0, n), n, Future()) for n in lengths]
    batch.admit(deque(requests))
    requests[2].future.cancel()
    seen = []
    with batch.step_context():
        for _ in range(4):
            ended = [request.sampling.max_tokens for request, _ in batch.step(0)]
            seen.append((ended, batch.busy))
    assert seen == [([], True), ([2], True), ([], True), ([4], False)]


def test_only_the_routes_asked_for_are_returned():
    (path,) = prompts(1, 9, 10)
    (whole,) = run(engine_of(make()), [(path, Sampling(1.0, 4), 4)])
    (part,) = run(engine_of(make()), [(path, Sampling(1.0, 4, routes_from=8), 4)])
    assert (part.first_slot, part.routing.spans) == (8, whole.routing.rows(8, 12).spans)
    assert torch.equal(part.routing.ids, whole.routing.ids[8:])
