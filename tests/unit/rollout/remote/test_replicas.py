"""Several engines as one: which engine is asked, the loss of one, and that none answers with old
weights."""

import asyncio
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.interfaces import EngineCaps
from onepolicy.rollout.remote.broadcast import ReplicaBroadcast
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.fleet import common_caps
from onepolicy.rollout.remote.replicas import Replicas
from onepolicy.sync.broadcast import Receiver, Sender
from onepolicy.sync.checksum import ChecksumAccumulator
from onepolicy.sync.signed_store import SignedStore
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights, read_weights
from onepolicy.types import Completion, Sampling
from support.waiting import LIMIT_S, until

GREEDY = Sampling(0.0, 4)


class Engine:
    """An engine whose completion is its prompt's last token, under the engine's version."""

    def __init__(self, name, *, lost_after=None, stale=False, seeded=True, max_len=8):
        self.name, self.version, self.asked, self.loaded = name, 0, [], []
        self.caps = EngineCaps(True, max_len, seeded=seeded)
        self.lost_after, self.stale = lost_after, stale

    async def generate(self, prompt_ids, sampling, *, seed):
        await asyncio.sleep(0)
        if self.lost_after is not None and len(self.asked) >= self.lost_after:
            raise EngineLost(f"{self.name} is gone")
        self.asked.append((tuple(prompt_ids), seed))
        tokens = torch.tensor([prompt_ids[-1]], dtype=torch.int32)
        version = torch.full_like(tokens, self.version - self.stale)
        return Completion(tokens, torch.zeros(1), version, "stop")

    async def load_files(self, written, shared=None):
        if self.lost_after is not None and len(self.asked) >= self.lost_after:
            raise EngineLost(f"{self.name} is gone")
        self.loaded.append(dict(read_weights(written.folder)))
        assert written.sums.keys() == self.loaded[-1].keys()
        self.version = written.version

    async def reset_cache(self):
        pass


def replicas(tmp_path, *engines):
    return Replicas(engines, WeightFiles(str(tmp_path)))


def play(engine, prompts, sampling=GREEDY):
    async def all_of():
        return await asyncio.gather(
            *(engine.generate(p, sampling, seed=i) for i, p in enumerate(prompts))
        )

    return asyncio.run(all_of())


def load(together, version):
    asyncio.run(together.load_weights(iter([("a", torch.ones(1))]), version))


def test_siblings_and_later_turns_ask_one_engine(tmp_path):
    """A repeated run asks the same engines."""
    prompts = [[problem, 50, 51] for problem in range(32) for _ in range(2)]
    turns = [[*p, 7, 8] for p in prompts]
    seen = []
    for _ in range(2):
        engines = [Engine(f"replica {i}") for i in range(3)]
        together = replicas(tmp_path, *engines)
        play(together, prompts)
        load(together, 1)  # an update while the episodes are in play
        play(together, turns, replace(GREEDY, initial_prompt_len=3))
        of = {path: engine.name for engine in engines for path, _ in engine.asked}
        assert sum(len(engine.asked) for engine in engines) == 128
        for problem in range(32):
            assert of[problem, 50, 51] == of[problem, 50, 51, 7, 8]
        assert set(of.values()) == {engine.name for engine in engines}
        seen.append(of)
    assert seen[0] == seen[1]


def test_requests_of_a_lost_engine_are_repeated_with_their_seeds(tmp_path, caplog):
    engines = [Engine("replica 0"), Engine("replica 1", lost_after=3)]
    prompts = [[problem, 9] for problem in range(40)]
    together = replicas(tmp_path, *engines)
    done = play(together, prompts)
    assert [c.token_ids.tolist() for c in done] == [[9]] * 40
    asked = engines[0].asked + engines[1].asked
    assert sorted(asked) == [(tuple(p), i) for i, p in enumerate(prompts)]  # each once, none twice
    assert len(engines[1].asked) == 3
    assert together.names == ["replica 0"]
    assert "1 engines that are left" in caplog.text


def test_weights_reach_all_and_a_lost_engine_is_left_out(tmp_path):
    engines = [Engine("replica 0"), Engine("replica 1"), Engine("replica 2", lost_after=0)]
    together = replicas(tmp_path, *engines)
    weights = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}
    asyncio.run(together.load_weights(iter(weights.items()), 5))
    assert together.version == 5
    assert together.names == ["replica 0", "replica 1"]
    for engine in engines[:2]:
        (loaded,) = engine.loaded
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


open_broadcast = partial(ReplicaBroadcast, host="127.0.0.1", limit=LIMIT_S)


class Receives(Engine):
    """An engine that is one of the receivers of a broadcast."""

    async def load_files(self, written, shared=None):
        self.loaded.append(await shared.send_to(partial(asyncio.to_thread, taken)))
        self.version = written.version


def broadcast_to(tmp_path, *receive):
    """Return the result of each receiver."""
    checksums = ChecksumAccumulator(b"key")
    weights = checksums.add_each([("a", torch.arange(3.0)), ("b", torch.ones(2, 2))])
    files = WeightFiles(str(tmp_path))  # its folder goes with it
    folder = files.write_version(weights, 5)
    written = WrittenWeights(str(folder), 5, b"key", checksums.pop_all())

    async def main():
        async with open_broadcast(written, len(receive)) as broadcast:
            takes = (broadcast.send_to(partial(asyncio.to_thread, each)) for each in receive)
            return await asyncio.gather(*takes, return_exceptions=True)

    return asyncio.run(main())


def taken(invitation, rank):
    with Receiver(invitation, rank, version=5) as weights:
        return dict(weights)


def refused(invitation, rank):
    raise ConnectionError("gone")


def test_a_failing_receiver_ends_a_broadcast_for_all(tmp_path):
    there, gone = broadcast_to(tmp_path, taken, refused)
    assert isinstance(gone, ConnectionError)
    assert isinstance(there, TrainingError)
    assert "UpdateCancelled" in str(there)


def test_a_fault_of_the_sender_is_raised_if_no_receiver_saw_it(tmp_path, monkeypatch):
    """Both receivers take the broadcast for complete. The sender has no confirmation from them."""
    monkeypatch.setattr(Sender, "send", lambda *_: pytest.fail("unheard"))
    with pytest.raises(pytest.fail.Exception, match="unheard"):
        broadcast_to(tmp_path, lambda *_: {}, lambda *_: {})


def test_replicas_share_one_broadcast(tmp_path):
    opened = []

    def noted(*args):
        opened.append(args)
        return open_broadcast(*args)

    engines = [Receives("replica 0"), Receives("replica 1")]
    load(Replicas(engines, WeightFiles(str(tmp_path)), broadcast=noted), 5)
    assert [each["a"].tolist() for engine in engines for each in engine.loaded] == [[1], [1]]
    assert [(written.version, receivers) for written, receivers in opened] == [(5, 2)]


def test_files_changed_after_writing_are_not_sent(tmp_path):
    """A bit of a file has changed by the time that it is read."""

    class Damaged(WeightFiles):
        def write_version(self, weights, version, **keywords):
            folder = super().write_version(weights, version, **keywords)
            (path,) = folder.glob("*.safetensors")
            data = bytearray(path.read_bytes())
            data[-1] ^= 0x40
            path.write_bytes(data)
            return folder

    engine = Receives("replica 0")
    together = Replicas([engine], Damaged(str(tmp_path)), broadcast=open_broadcast)
    with pytest.raises(TrainingError, match="the tensors to send have changed: the bytes of 'a'"):
        load(together, 5)
    assert not engine.loaded


def test_a_delayed_sender_whose_receivers_ended_has_not_failed(tmp_path, monkeypatch):
    """It reads their last message only when the broadcast is already being left."""
    wait, leave, left = SignedStore.wait_for_messages, ReplicaBroadcast.__aexit__, threading.Event()

    def held_up(board, names, meanwhile):
        if names[0].startswith("done/"):
            assert left.wait(LIMIT_S)
        return wait(board, names, meanwhile)

    async def leaving(broadcast, *error):
        asyncio.get_running_loop().call_soon(left.set)  # once __aexit__ waits for the sender
        return await leave(broadcast, *error)

    monkeypatch.setattr(SignedStore, "wait_for_messages", held_up)
    monkeypatch.setattr(ReplicaBroadcast, "__aexit__", leaving)
    (found,) = broadcast_to(tmp_path, taken)
    assert found.keys() == {"a", "b"}


@pytest.mark.full
def test_a_broadcast_may_take_longer_than_any_wait_in_it(tmp_path, monkeypatch):
    """The sender sends until the receiver has loaded all, which takes three times the limit."""
    limit, loaded = 0.5, threading.Event()
    monkeypatch.setattr(Sender, "send", lambda *_: loaded.wait(LIMIT_S))
    written = WrittenWeights(str(tmp_path), 5, b"key", {})

    async def load(*_):
        await asyncio.sleep(3 * limit)
        loaded.set()
        return "loaded"

    async def silent(*_):
        await asyncio.sleep(LIMIT_S)

    async def receive(how):
        async with ReplicaBroadcast(written, 1, host="127.0.0.1", limit=limit) as broadcast:
            return await broadcast.send_to(how)

    assert asyncio.run(receive(load)) == "loaded"
    with pytest.raises(TimeoutError):  # all has been sent
        asyncio.run(receive(silent))


def test_the_loss_of_all_engines_and_old_weights_in_one_are_errors(tmp_path):
    class Keeps(Engine):
        async def load_files(self, written, shared=None):
            pass

    left = replicas(tmp_path, Engine("replica 0", lost_after=0))
    with pytest.raises(TrainingError, match=r"none of the engines is left: .*gone; `--resume`"):
        play(left, [[1]])
    stale = replicas(tmp_path, Engine("replica 0", stale=True))
    with pytest.raises(TrainingError, match="of weight version 0 with tokens of versions -1"):
        play(stale, [[1]])
    with pytest.raises(TrainingError, match="replica 0 holds weight version 0 after loading 3"):
        load(replicas(tmp_path, Keeps("replica 0")), 3)


def test_answers_during_loading_are_of_the_old_or_the_new_weights(tmp_path):
    """One engine has taken the update, the other has not yet. Requests come from before it and from
    meanwhile."""

    class Slow(Engine):
        async def load_files(self, written, shared=None):
            await loaded.wait()
            await super().load_files(written)

    async def main():
        engines = [Engine("replica 0"), Slow("replica 1")]
        together = replicas(tmp_path, *engines)
        roots = [[problem] for problem in range(8)]
        before = [asyncio.create_task(together.generate(root, GREEDY, seed=0)) for root in roots]
        await asyncio.sleep(0)
        update = asyncio.create_task(together.load_weights(iter([("a", torch.ones(1))]), 1))
        done = [int(each.version[0]) for each in await asyncio.gather(*before)]
        await until(lambda: engines[0].version)
        done += [int((await together.generate(root, GREEDY, seed=0)).version[0]) for root in roots]
        loaded.set()
        await update
        after = [int((await together.generate(root, GREEDY, seed=0)).version[0]) for root in roots]
        return done, after

    loaded = asyncio.Event()
    done, after = asyncio.run(main())
    assert set(done) == {0, 1}
    assert set(after) == {1}


def test_caps_are_those_that_all_have():
    caps = common_caps([EngineCaps(True, 8, True, 5), EngineCaps(False, 4, True, 3, seeded=False)])
    assert caps == EngineCaps(False, 4, True, 3, seeded=False)
