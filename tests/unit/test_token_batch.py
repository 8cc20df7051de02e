"""TokenBatch.select keeps every per-slot and per-sample field, routes included, with its own
sample."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.types import RouteSpan, RoutingTrace, TokenBatch

SAMPLE_FIELDS = ("temperature", "outcome", "group", "episode")
TRACES = ("routing", "routing_native")
OPTIONAL = [
    f.name for f in dataclasses.fields(TokenBatch) if f.default is None and f.name not in TRACES
]


def _batch(lengths: list[int], *, filled: bool) -> TokenBatch:
    """Return a batch in which slot i has the number i (or i + a constant) in every field."""
    total = sum(lengths)
    slots, count = torch.arange(total), len(lengths)
    real = slots.float()
    routing = RoutingTrace(
        torch.stack([slots % 200, slots % 200 + 1], -1)[:, None].to(torch.uint8),
        slots % 2 == 0,
        (3,),
        201,
        (RouteSpan(0, total, "decode", 0),),
    )
    extra = {name: real + k for k, name in enumerate(OPTIONAL)} if filled else {}
    if filled:
        extra |= {
            "keep": slots % 3 == 0,
            "routing": routing,
            "routing_native": routing,
            "gate_mass": real[:, None],
        }
        extra["episode"] = torch.arange(count) % 2
    return TokenBatch(
        input_ids=slots,
        target_ids=slots + 1,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        segment=torch.arange(count).repeat_interleave(torch.tensor(lengths)),
        trainable=slots % 5 != 0,
        version=slots.int(),
        turn=slots.int() % 4,
        logp_rollout=-real,
        temperature=torch.arange(count) + 0.5,
        outcome=torch.arange(count) * 2.0,
        group=torch.arange(count) // 2,
        fingerprints=frozenset({"one build"}),
        **extra,  # type: ignore[arg-type]
    )


def test_select_by_hand() -> None:
    """The batch has samples of 2, 3 and 1 slots: the third, then the first."""
    part = _batch([2, 3, 1], filled=True).select([2, 0])
    assert part.input_ids.tolist() == [5, 0, 1]
    assert part.positions.tolist() == [0, 0, 1]
    assert part.cu_seqlens.tolist() == [0, 1, 3]
    assert part.cu_seqlens.dtype == torch.int32
    assert part.segment.tolist() == [0, 1, 1]
    assert part.temperature.tolist() == [2.5, 0.5]
    assert part.group.tolist() == [1, 0]
    assert part.routing is not None
    assert part.routing.ids[:, 0, 0].tolist() == [5, 0, 1]
    assert part.routing.valid.tolist() == [False, True, False]
    assert part.routing.spans == ()  # rows of several samples have no common span
    assert (part.num_samples, part.num_slots) == (2, 3)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.data())
def test_every_field_follows_its_sample(
    lengths: list[int], filled: bool, data: st.DataObject
) -> None:
    batch = _batch(lengths, filled=filled)
    chosen = data.draw(
        st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6, unique=True)
    )
    part = batch.select(chosen)
    bounds = batch.cu_seqlens.tolist()
    slots = [slot for s in chosen for slot in range(bounds[s], bounds[s + 1])]
    for field in dataclasses.fields(TokenBatch):
        before, after = getattr(batch, field.name), getattr(part, field.name)
        if before is None:
            assert after is None
        elif field.name == "fingerprints":
            assert after == before
        elif field.name in SAMPLE_FIELDS:
            assert torch.equal(after, before[chosen])
        elif isinstance(before, RoutingTrace):
            assert torch.equal(after.ids, before.ids[slots])
            assert torch.equal(after.valid, before.valid[slots])
        elif field.name not in ("cu_seqlens", "segment"):
            assert torch.equal(after, before[slots]), field.name
            assert after.dtype == before.dtype
    assert (
        part.cu_seqlens.tolist()
        == torch.tensor([0, *[lengths[s] for s in chosen]]).cumsum(0).tolist()
    )
    assert part.segment.tolist() == [i for i, s in enumerate(chosen) for _ in range(lengths[s])]
    assert (part.positions[part.cu_seqlens[:-1].long()] == 0).all()


def test_selecting_all_in_order_is_the_same_batch() -> None:
    batch = _batch([3, 1, 4], filled=True)
    again = batch.select([0, 1, 2])
    for field in dataclasses.fields(TokenBatch):
        value = getattr(again, field.name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(batch, field.name)), field.name
