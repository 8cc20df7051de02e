"""Several engines as one: which engine is asked, the loss of one, and that none answers with old
weights."""

import asyncio
from dataclasses import replace

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.config.quant import Int8
from onepolicy.interfaces import EngineCaps
from onepolicy.launch.ray.replicas import Replicas
from onepolicy.launch.ray.tensors import from_buckets
from onepolicy.models.quant.size_report import PartSize, SizeReport
from onepolicy.rollout.remote.client import EngineLost
from onepolicy.rollout.remote.fleet import common_caps
from onepolicy.types import Completion, Sampling
from support.waiting import until

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

    async def load(self, weights, version):
        if self.lost_after is not None and len(self.asked) >= self.lost_after:
            raise EngineLost(f"{self.name} is gone")
        self.loaded.append(dict(from_buckets(weights)))
        self.version = version

    async def reset_cache(self):
        pass


def replicas(*engines):
    return Replicas(engines, lambda value: value)


def play(engine, prompts, sampling=GREEDY):
    async def all_of():
        return await asyncio.gather(
            *(engine.generate(p, sampling, seed=i) for i, p in enumerate(prompts))
        )

    return asyncio.run(all_of())


def load(together, version):
    asyncio.run(together.load_weights(iter([("a", torch.ones(1))]), version))


def test_siblings_and_later_turns_ask_one_engine():
    """A repeated run asks the same engines."""
    prompts = [[problem, 50, 51] for problem in range(32) for _ in range(2)]
    turns = [[*p, 7, 8] for p in prompts]
    seen = []
    for _ in range(2):
        engines = [Engine(f"replica {i}") for i in range(3)]
        together = replicas(*engines)
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


def test_requests_of_a_lost_engine_are_repeated_with_their_seeds(caplog):
    engines = [Engine("replica 0"), Engine("replica 1", lost_after=3)]
    prompts = [[problem, 9] for problem in range(40)]
    together = replicas(*engines)
    done = play(together, prompts)
    assert [c.token_ids.tolist() for c in done] == [[9]] * 40
    asked = engines[0].asked + engines[1].asked
    assert sorted(asked) == [(tuple(p), i) for i, p in enumerate(prompts)]  # each once, none twice
    assert len(engines[1].asked) == 3
    assert together.names == ["replica 0"]
    assert "1 engines that are left" in caplog.text


def test_weights_reach_all_and_a_lost_engine_is_left_out():
    engines = [Engine("replica 0"), Engine("replica 1"), Engine("replica 2", lost_after=0)]
    together = replicas(*engines)
    weights = {"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}
    asyncio.run(together.load_weights(iter(weights.items()), 5))
    assert together.version == 5
    assert together.names == ["replica 0", "replica 1"]
    for engine in engines[:2]:
        (loaded,) = engine.loaded
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_the_loss_of_all_engines_and_old_weights_in_one_are_errors():
    class Keeps(Engine):
        async def load(self, weights, version):
            pass

    left = replicas(Engine("replica 0", lost_after=0))
    with pytest.raises(TrainingError, match=r"none of the engines is left: .*gone; `--resume`"):
        play(left, [[1]])
    stale = replicas(Engine("replica 0", stale=True))
    with pytest.raises(TrainingError, match="of weight version 0 with tokens of versions -1"):
        play(stale, [[1]])
    with pytest.raises(TrainingError, match="replica 0 holds weight version 0 after loading 3"):
        load(replicas(Keeps("replica 0")), 3)


def test_answers_during_loading_are_of_the_old_or_the_new_weights():
    """One engine has taken the update, the other has not yet. Requests come from before it and from
    meanwhile."""

    class Slow(Engine):
        async def load(self, weights, version):
            await loaded.wait()
            await super().load(weights, version)

    async def main():
        engines = [Engine("replica 0"), Slow("replica 1")]
        together = replicas(*engines)
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
    sizes = SizeReport(Int8(), [PartSize("experts", 4, 8, 4)])
    one, other = EngineCaps(True, 8, True, 5), EngineCaps(False, 4, True, 3, seeded=False)
    caps = common_caps([replace(one, sizes=sizes), replace(other, sizes=sizes)])
    assert caps == EngineCaps(False, 4, True, 3, seeded=False, sizes=sizes)
