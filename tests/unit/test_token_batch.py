"""TokenBatch.select keeps every field, routes included, with its own sample."""

import dataclasses
from itertools import accumulate

import torch
from hypothesis import given, settings
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
    ids = torch.stack([slots % 200, slots % 200 + 1], -1)[:, None].to(torch.uint8)
    spans = (RouteSpan(0, total, "decode", 0),)
    routing = RoutingTrace(ids, slots % 2 == 0, (3,), 201, spans)
    extra: dict = {}
    if filled:
        extra |= {name: real + k for k, name in enumerate(OPTIONAL)}
        extra |= {"routing": routing, "routing_native": routing, "keep": slots % 3 == 0}
        extra |= {"gate_mass": real[:, None], "episode": torch.arange(count) % 2}
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
        **extra,
    )


def test_select_by_hand() -> None:
    """The batch has samples of 2, 3 and 1 slots: the third, then the first."""
    part = _batch([2, 3, 1], filled=True).select([2, 0])
    for name, values in {
        "input_ids": [5, 0, 1],
        "positions": [0, 0, 1],
        "cu_seqlens": [0, 1, 3],
        "segment": [0, 1, 1],
        "temperature": [2.5, 0.5],
        "group": [1, 0],
    }.items():
        assert getattr(part, name).tolist() == values, name
    assert part.cu_seqlens.dtype == torch.int32
    assert part.routing.ids[:, 0, 0].tolist() == [5, 0, 1]
    assert part.routing.valid.tolist() == [False, True, False]
    assert part.routing.spans == ()  # rows of several samples have no common span
    assert (part.num_samples, part.num_slots) == (2, 3)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.booleans(), st.data())
def test_every_field_follows_its_sample(lengths, filled, data) -> None:
    batch = _batch(lengths, filled=filled)
    samples = st.integers(0, len(lengths) - 1)
    chosen = data.draw(st.lists(samples, min_size=1, max_size=6, unique=True))
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
    assert part.cu_seqlens.tolist() == list(accumulate([0, *(lengths[s] for s in chosen)]))
    assert part.segment.tolist() == [i for i, s in enumerate(chosen) for _ in range(lengths[s])]
    assert (part.positions[part.cu_seqlens[:-1].long()] == 0).all()
