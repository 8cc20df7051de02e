"""Time limits of a weight update are of each wait in it, and weights are asked for by bucket."""

import asyncio
import math

import pytest
import torch

from onepolicy.rollout.servers.http import EngineLost
from onepolicy.rollout.sglang import weights as sglang
from onepolicy.rollout.vllm.server import _both_ends
from support.fake_vllm import connected, make_checkpoints, serving

TIMEOUT_S = 77.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(("sync", "limit"), [("gloo", math.inf), ("disk", TIMEOUT_S)])
def test_an_update_has_no_limit_as_a_whole(sync, limit, checkpoints, tmp_path):
    limits = []
    with serving(checkpoints) as fake:
        engine = connected(fake, sync=sync, sync_dir=str(tmp_path), timeout_s=TIMEOUT_S)
        for client in (engine.client, engine._client_without_retries):
            _record_limits(client, limits)
        asyncio.run(engine.load_weights(checkpoints[1][1].state_dict().items(), 1))
    assert limits == [limit]
    assert engine.version == 1


def _record_limits(client, limits):
    post = client.post

    async def recording(path, body=None, **kwargs):
        if path == "/collective_rpc":
            limits.append(kwargs["timeout_s"])
        return await post(path, body, **kwargs)

    client.post = recording


def test_a_server_that_is_silent_after_the_last_bucket_is_lost():
    async def never():
        await asyncio.Event().wait()
        return []

    async def sent():
        return "digest"

    with pytest.raises(EngineLost, match=r"did not say within 0\.01 s"):
        asyncio.run(_both_ends(never(), sent(), 0.01))


def test_the_errors_of_both_ends_are_returned():
    async def refused():
        raise EngineLost("gone")

    async def broken():
        raise ValueError("no weights")

    problems, sent = asyncio.run(_both_ends(refused(), broken(), 1.0))
    assert (str(problems), str(sent)) == ("gone", "no weights")


def test_sglang_is_sent_one_bucket_while_the_next_is_gathered(monkeypatch):
    """All tensors of a model at once would take its size in float32 on rank 0's GPU."""
    monkeypatch.setattr(sglang, "BUCKET_BYTES", 64)
    gathered = []

    def weights():
        for i in range(20):
            gathered.append(i)
            yield f"w{i}", torch.full((8,), float(i))  # 32 bytes: two in a bucket

    buckets = sglang.in_buckets(weights())
    assert list(next(buckets)) == ["w0", "w1"]
    assert len(gathered) == 3  # the first of the next bucket closes this one
    assert [name for bucket in buckets for name in bucket] == [f"w{i}" for i in range(2, 20)]


def test_wider_tensors_of_a_bucket_come_first():
    """The server reads each at a multiple of its item size."""
    mixed = [
        ("half", torch.zeros(3, dtype=torch.bfloat16)),
        ("router", torch.zeros(3)),
        ("byte", torch.zeros(1, dtype=torch.uint8)),
    ]
    (bucket,) = sglang.in_buckets(mixed)
    assert list(bucket) == ["router", "half", "byte"]
