"""Time limits of a weight update are of each wait in it, and weights are asked for by bucket."""

import asyncio
import math
import threading
from functools import partial

import pytest
import torch

from onepolicy.config import SGLangConfig, TrainingError
from onepolicy.rollout.remote import dialect as dialects
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.dialects import sglang_weights as sglang
from onepolicy.rollout.remote.dialects.sglang import SGLangDialect
from onepolicy.rollout.remote.update_ends import run_both_ends
from onepolicy.sync.broadcast import ReceiverLost, UpdateCancelled
from onepolicy.sync.weight_files import INDEX
from support.fake_vllm import connected, serving
from support.waiting import LIMIT_S

TIMEOUT_S = 77.0


@pytest.mark.parametrize(("sync", "limit"), [("gloo", math.inf), ("disk", TIMEOUT_S)])
def test_an_update_has_no_limit_as_a_whole(sync, limit, checkpoints, tmp_path, monkeypatch):
    limits = []
    with serving(checkpoints) as fake:
        engine = connected(fake, sync=sync, sync_dir=str(tmp_path), timeout_s=TIMEOUT_S)
        post = type(engine.client).post

        async def recording(client, path, body=None, **kwargs):
            if path == "/collective_rpc":
                limits.append(kwargs["timeout_s"])
            return await post(client, path, body, **kwargs)

        monkeypatch.setattr(type(engine.client), "post", recording)
        asyncio.run(engine.load_weights(checkpoints[1][1].state_dict().items(), 1))
    assert limits == [limit]
    assert engine.version == 1


def test_a_checkpoint_has_the_limit_of_each_of_its_files_and_is_loaded_once(
    checkpoints, tmp_path, monkeypatch
):
    """Of a folder, and of a name of the hub that is cached here."""
    cached = tmp_path / "models--org--name"
    for folder in (tmp_path / "folder", cached / "snapshots" / "abc"):
        folder.mkdir(parents=True)
        for number in range(3):
            (folder / f"model-{number}.safetensors").touch()
        (folder / INDEX).touch()
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    find = partial(dialects.try_to_load_from_cache, cache_dir=tmp_path)
    monkeypatch.setattr(dialects, "try_to_load_from_cache", find)
    asked = []

    async def loaded(path, body, *, timeout_s, **kwargs):
        asked.append((body.get("args", body.get("model_path")), timeout_s))
        return [None]

    with serving(checkpoints) as fake:
        vllm = connected(fake, timeout_s=TIMEOUT_S).dialect
    config = SGLangConfig(url=fake.server.url, timeout_s=TIMEOUT_S)
    slang = SGLangDialect(config, vllm.hf_config, vllm.shape, None, adapters=False)
    places = {str(tmp_path / "folder"): 3, "org/name": 3, "org/other": 1, "/elsewhere/model": 1}
    for place, files in places.items():
        for dialect, told in ((vllm, [place]), (slang, place)):
            monkeypatch.setattr(dialect.once, "post", loaded)
            asyncio.run(dialect.load_checkpoint(place, 0))
            assert asked.pop() == (told, files * TIMEOUT_S)


async def never():
    await asyncio.Event().wait()


async def received():
    return []


async def sent():
    return "digest"


async def raising(error):
    raise error


def outcome(receive, send):
    """Raise the error of an update with these two ends."""
    return asyncio.run(run_both_ends(receive, send, 0.01, "the server"))


def test_a_server_that_is_silent_after_the_last_bucket_is_lost():
    with pytest.raises(EngineLost, match=r"did not say within 0\.01 s"):
        outcome(never(), sent())


def test_a_sender_that_hangs_after_the_server_has_answered_is_given_up():
    """A broadcast of NCCL may never end once the other side is gone."""
    with pytest.raises(TrainingError, match=r"0\.01 s .* still being sent"):
        outcome(received(), never())
    with pytest.raises(EngineLost, match=r"gone; the sending end: .* still being sent"):
        outcome(raising(EngineLost("gone")), never())


def test_the_first_cause_is_raised():
    """A server whose sender has failed is silent for that reason, and is not lost."""
    with pytest.raises(ValueError, match="no weights"):
        outcome(never(), raising(ValueError("no weights")))
    with pytest.raises(ValueError, match="no weights"):
        outcome(raising(EngineLost("gone")), raising(ValueError("no weights")))
    with pytest.raises(EngineLost, match="gone; the sending end: receiver 2 is slow"):
        outcome(raising(EngineLost("gone")), raising(ReceiverLost("receiver 2 is slow")))
    with pytest.raises(EngineLost, match=r"^gone$"):
        outcome(raising(EngineLost("gone")), raising(UpdateCancelled("given up")))
    assert outcome(received(), sent()) == "digest"


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
    kinds = {"half": torch.bfloat16, "router": torch.float32, "byte": torch.uint8}
    mixed = [(name, torch.zeros(3, dtype=dtype)) for name, dtype in kinds.items()]
    (bucket,) = sglang.in_buckets(mixed)
    assert list(bucket) == ["router", "half", "byte"]


BUCKET, JOIN = "/update_weights_from_distributed", "/init_weights_update_group"


class SGLangClient:
    """A client of a server that confirms every request. replies: path -> what is awaited first."""

    url = "http://127.0.0.1:1"

    def __init__(self, **replies):
        self.replies, self.limits = replies, {}

    async def post(self, path, body, *, parse, timeout_s=None):
        self.limits[path] = timeout_s
        if path in self.replies:
            await self.replies[path]()


@pytest.fixture
def one_rank(monkeypatch):
    """Replace the group of an update to SGLang by a broadcast that ends at once."""
    monkeypatch.setattr(sglang, "sender_address", lambda url, server: "127.0.0.1")
    monkeypatch.setattr(sglang, "make_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(sglang, "start_broadcast", lambda group, flat: None)
    return monkeypatch


def update_sglang(client):
    settings = {"backend": "gloo", "ranks": 1, "timeout_s": TIMEOUT_S, "flush": True}
    asyncio.run(sglang.broadcast_weights(client, [("w", torch.zeros(4))], "id", **settings))


def test_the_end_of_an_update_of_sglang_has_the_configured_limit(one_rank):
    """The server may still be loading the last bucket."""
    client = SGLangClient()
    update_sglang(client)
    assert client.limits["/end_weight_update"] == TIMEOUT_S
    assert client.limits["/destroy_weights_update_group"] == TIMEOUT_S


@pytest.mark.parametrize(
    ("path", "call"), [(BUCKET, "start_broadcast"), (JOIN, "make_process_group")]
)
def test_an_sglang_server_that_is_lost_is_so_although_our_end_fails_first(one_rank, path, call):
    threads = []

    def fails(*args, **kwargs):
        threads.append(threading.current_thread())
        raise RuntimeError("Connection closed by peer")

    async def lost():
        while not threads or threads[0].is_alive():
            await asyncio.sleep(0)
        for _ in range(100):  # turns of the loop, in which the failed thread is noticed
            await asyncio.sleep(0)
        raise EngineLost("gone")

    one_rank.setattr(sglang, call, fails)
    with pytest.raises(EngineLost, match=r"gone; the sending end: .*Connection closed by peer"):
        update_sglang(SGLangClient(**{path: lost}))


def test_a_failed_group_with_sglang_is_no_bucket_that_was_not_taken(one_rank):
    def fails(*args, **kwargs):
        raise RuntimeError("no device eth7")

    one_rank.setattr(sglang, "make_process_group", fails)
    with pytest.raises(TrainingError, match="group with the SGLang server could not be made: no d"):
        update_sglang(SGLangClient())


def test_our_own_lack_of_memory_is_not_the_sglang_servers_fault(one_rank):
    def fails(tensors):
        raise torch.OutOfMemoryError("CUDA out of memory")

    client = SGLangClient()
    one_rank.setattr(sglang.torch, "cat", fails)
    with pytest.raises(TrainingError, match=r"this process could not copy .*out of memory"):
        update_sglang(client)
    assert BUCKET not in client.limits  # it would wait for the bytes


def test_a_refusal_of_sglang_is_raised_while_the_broadcast_hangs(one_rank):
    given_up = threading.Event()

    async def refuses():
        raise TrainingError("no such parameter")

    one_rank.setattr(sglang, "start_broadcast", lambda *args: given_up.wait(LIMIT_S))
    try:
        with pytest.raises(TrainingError, match=r"^no such parameter$"):
            update_sglang(SGLangClient(**{BUCKET: refuses}))
    finally:
        given_up.set()
