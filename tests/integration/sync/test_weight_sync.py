"""The embedded engine takes weights from another process's Sender as it takes them from this
process's learner."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.sync import broadcast
from onepolicy.sync.broadcast import Receiver, Sender
from onepolicy.sync.buckets import flatten_tensors
from support.engine_runs import build, prompts, ragged, run
from support.models import make


def sent(engine, model, version, *, promised=None):
    """Run both ends in this process, and raise the error of the engine's end."""

    def receive(invitation):
        with Receiver(invitation, 1, version=promised or version) as weights:
            asyncio.run(engine.load_weights(weights, promised or version))

    with Sender(receivers=1, timeout_s=30) as sender, ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive, sender.invitation)
        try:
            sender.send(model.state_dict().items(), version)
        except TrainingError:
            assert receiving.exception() is not None  # both sides know
        receiving.result()


def same(ours, theirs):
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.logp, theirs.logp)
    assert torch.equal(ours.routing.ids, theirs.routing.ids)


def test_after_every_update_it_equals_a_fresh_engine(monkeypatch):
    """After an altered update, or one of another version, it answers nothing until a complete set
    arrives."""
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 2**15)
    engine, requests = build("qwen3_moe"), ragged(prompts(3, 10, 12), spread=9)
    models = [make("qwen3_moe", seed=seed) for seed in (1, 2)]
    run(engine, requests)  # leaves its prefixes cached
    for version, index in enumerate((0, 1, 1), start=1):
        sent(engine, models[index], version)
        fresh = build("qwen3_moe")
        asyncio.run(fresh.load_weights(models[index].state_dict().items(), version))
        expected = run(fresh, requests)
        for ours, theirs in zip(run(engine, requests), expected, strict=True):
            same(ours, theirs)
            assert (ours.version == version).all()

    buckets = []

    def flipped(tensors, **where):
        buckets.append(flatten_tensors(tensors, **where).clone())
        buckets[-1][0] ^= len(buckets) == 5
        return buckets[-1]

    with monkeypatch.context() as planted:
        planted.setattr(broadcast, "flatten_tensors", flipped)
        with pytest.raises(TrainingError, match=r"5: the bytes of '.*' are not those that were s"):
            sent(engine, models[0], 5)
    for _ in range(2):
        assert engine.version == -1
        with pytest.raises(RuntimeError, match="half-way"):
            run(engine, requests)
        with pytest.raises(TrainingError, match="version 4 came instead of version 6"):
            sent(engine, models[0], 4, promised=6)
    sent(engine, models[1], 7)
    same(run(engine, requests)[0], expected[0])
