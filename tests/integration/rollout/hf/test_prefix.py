"""Prefix reuse: rows taken over from another request are bit-equal, routes included, and not
computed again."""

import asyncio

import pytest
import torch

from onepolicy.types import Sampling
from support.engine_runs import build, check_against_stock, prompts, ragged, run
from support.models import make


@pytest.fixture
def fed(monkeypatch):
    """Return the number of tokens in each forward of the engine returned by `fed.watch`."""

    class Fed(list):
        def watch(self, engine):
            forward = engine.batch.forward
            call = type(forward).__call__

            def counting(own, ids, *args):
                self.append(len(ids))
                return call(own, ids, *args)

            monkeypatch.setattr(type(forward), "__call__", counting)
            return engine

    return Fed()


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.full)]
)
def test_siblings_are_prefilled_once(name, fed):
    engine = fed.watch(build(name, max_num_seqs=8))
    (path,) = prompts(1, 20, 21)
    requests = [(path, Sampling(1.0, 6), seed) for seed in range(8)]
    done = run(engine, requests)
    assert fed == [20] + [8] * 5
    check_against_stock(make(name), requests, done)
    assert done[0].routing.spans[0].source == "prefill"
    for sibling in done[1:]:
        assert torch.equal(sibling.routing.ids[:20], done[0].routing.ids[:20])
        span = sibling.routing.spans[0]
        assert (span.source, span.start, span.length) == ("cache", 0, 20)
    cache = engine.batch.cache
    for keys, values in zip(cache.keys.values(), cache.values.values(), strict=True):
        assert torch.equal(keys[:1, :, :, :20].expand(8, -1, -1, -1), keys[:, :, :, :20])
        assert torch.equal(values[:1, :, :20].expand(8, -1, -1, -1), values[:, :, :20])


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_next_turn_prefills_only_new_tokens(name, fed):
    """In two episodes each second prompt is the first path plus an observation."""
    engine = fed.watch(build(name, max_num_seqs=4))
    first = [(p, Sampling(1.0, 10), i) for i, p in enumerate(prompts(2, 12, 13))]
    done = run(engine, first)
    fed.clear()
    pairs = enumerate(zip(first, done, strict=True))
    paths = [(i, [*p, *c.token_ids.tolist(), 7, 8, 9]) for i, ((p, _, _), c) in pairs]
    second = [(path, Sampling(1.0, 5), i) for i, path in paths]
    again = run(engine, second)
    assert fed[0] == 2 * 4  # the last sampled token and the observation
    check_against_stock(make(name), second, again)
    for before, after in zip(done, again, strict=True):
        assert torch.equal(after.routing.ids[:21], before.routing.ids)
        spans = [(s.source, s.start, s.length) for s in after.routing.spans]
        assert spans == [("cache", 0, 21), ("prefill", 21, 4), ("decode", 25, 4)]


def test_a_running_row_lends_its_prefix(fed):
    engine = fed.watch(build("qwen3_moe", max_num_seqs=2))
    (path,) = prompts(1, 20, 21)
    late = [*path[:15], 3, 4]

    async def main():
        running = asyncio.create_task(engine.generate(path, Sampling(1.0, 30), seed=0))
        for _ in range(6):
            await asyncio.sleep(0)
        fed.clear()
        joined = await engine.generate(late, Sampling(1.0, 4), seed=1)
        return await running, joined

    source, joined = asyncio.run(main())
    assert fed[0] == 2 or fed[1] == 2
    assert torch.equal(joined.routing.ids[:15], source.routing.ids[:15])
    requests = [(path, Sampling(1.0, 30), 0), (late, Sampling(1.0, 4), 1)]
    check_against_stock(make("qwen3_moe"), requests, [source, joined])


def test_rows_taken_from_each_other_at_once():
    """The KV cache is full, and every new prompt continues a row that another prompt may have to
    overwrite."""
    engine = build("qwen3_moe", max_num_seqs=3)
    first = [(p, Sampling(1.0, 5), i) for i, p in enumerate(prompts(3, 15, 16))]
    run(engine, first)
    paths = [p for p, _, _ in first]
    second = [([*paths[i][:12], 5, i], Sampling(1.0, 8), i) for i in (2, 2, 0)]
    done = run(engine, second)
    check_against_stock(make("qwen3_moe"), second, done)
    third = ragged([[*paths[1][:9], 4], [*paths[2][:14], 6, 7], paths[0], paths[1], [9, 9]])
    check_against_stock(make("qwen3_moe"), third, run(engine, third))


def test_reuse_can_be_turned_off(fed):
    engine = fed.watch(build("qwen3_moe", enable_prefix_caching=False))
    (path,) = prompts(1, 20, 21)
    done = run(engine, [(path, Sampling(1.0, 2), seed) for seed in range(3)])
    assert fed[0] == 60
    assert all(c.routing.spans[0].source == "prefill" for c in done)
    fed.clear()
    run(engine, [(path, Sampling(1.0, 2), 0)])
    assert fed[0] == 20


def test_spans_follow_a_compacted_row():
    """The last of eight siblings ends after the others, so its row is moved to the front."""
    engine = build("qwen3_moe", max_num_seqs=8)
    (path,) = prompts(1, 20, 21)
    done = run(engine, [(path, Sampling(1.0, 3 if i < 7 else 30), i) for i in range(8)])
    assert [(s.source, s.length) for s in done[7].routing.spans] == [("cache", 20), ("decode", 29)]
    assert done[0].routing.spans[0].source == "prefill"


def test_only_the_routes_asked_for_are_returned():
    (path,) = prompts(1, 20, 21)
    (whole,) = run(build("qwen3_moe"), [(path, Sampling(1.0, 6), 3)])
    (part,) = run(build("qwen3_moe"), [(path, Sampling(1.0, 6, routes_from=17), 3)])
    assert (whole.first_slot, part.first_slot) == (0, 17)
    assert torch.equal(part.routing.ids, whole.routing.ids[17:])
    assert part.routing.spans == whole.routing.rows(17, 25).spans
    with pytest.raises(ValueError, match="routes_from: 20 is not a slot"):
        run(build("qwen3_moe"), [(path, Sampling(1.0, 6, routes_from=20), 3)])
