"""Routing disagreement against a brute-force oracle over Python sets, and by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.divergence import routing
from onepolicy.divergence.routing import differing_experts, routing_disagreement
from onepolicy.types import RoutingTrace, id_dtype
from support.examples import examples


def trace(ids: Tensor, *, experts: int = 8, valid: Tensor | None = None) -> RoutingTrace:
    valid = torch.ones(len(ids), dtype=torch.bool) if valid is None else valid
    return RoutingTrace(ids.to(id_dtype(experts)), valid, tuple(range(ids.shape[1])), experts)


def random_ids(seed: int, slots: int, layers: int, top_k: int, experts: int) -> Tensor:
    scores = torch.rand(slots, layers, experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(top_k, -1).indices


def test_by_hand() -> None:
    """Three slots, two layers, two experts. The third slot is invalid on one side."""
    a = trace(torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]]))
    # swapped, 1 differs; equal, 2 differ
    ids = torch.tensor([[[1, 0], [2, 4]], [[4, 5], [1, 0]], [[6, 7], [6, 7]]])
    b = trace(ids, valid=torch.tensor([True, True, False]))
    r = routing_disagreement(a, b, segment=torch.tensor([3, 5, 5]))
    assert (r.slots, r.routers, r.tokens, r.sequence) == (2, 0.5, 1.0, 1.0)
    assert r.experts == 3 / 4
    assert r.expert_counts.tolist() == [2, 1, 1]
    assert r.per_layer.tolist() == [0, 1]
    assert r.per_token_count.tolist() == [1, 1]
    assert r.sequence_mean.tolist() == [1, 1]
    assert r.metrics() == {"routing/routers": 0.5, "routing/tokens": 1.0, "routing/sequence": 1.0}
    assert "tensor" not in repr(r)  # a line, whatever the number of tokens


@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 12),
    layers=st.integers(1, 4),
    top_k=st.integers(1, 4),
    experts=st.sampled_from([4, 6, 300]),
)
@examples(80)
def test_matches_python_sets(seed: int, slots: int, layers: int, top_k: int, experts: int) -> None:
    left, right = (random_ids(seed + i, slots, layers, top_k, experts) for i in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(slots, layers, generator=generator) < 0.5
    right[same] = left[same].flip(-1)  # the same set in another order
    valid = [torch.rand(slots, generator=generator) < 0.8 for _ in range(2)]
    valid[0][0] = valid[1][0] = True
    segment = torch.arange(slots) // 3

    both = [t for t in range(slots) if valid[0][t] and valid[1][t]]
    missing = [
        [len(set(left[t, k].tolist()) ^ set(right[t, k].tolist())) // 2 for k in range(layers)]
        for t in both
    ]  # ids of one row are distinct, so the symmetric difference is even
    differing = [sum(m > 0 for m in row) for row in missing]
    by_sample = [
        [d for t, d in zip(both, differing, strict=True) if segment[t] == s] for s in range(slots)
    ]
    means = [sum(d) / len(d) for d in by_sample if d]

    both_sides = zip((left, right), valid, strict=True)
    a, b = (trace(ids, experts=experts, valid=on) for ids, on in both_sides)
    for sides in ((a, b), (b, a)):
        r = routing_disagreement(*sides, segment=segment)
        assert r.slots == len(both)
        assert r.per_token_count.tolist() == differing
        assert r.routers == pytest.approx(sum(differing) / (len(both) * layers))
        assert r.tokens == pytest.approx(sum(d > 0 for d in differing) / len(both))
        assert r.experts == pytest.approx(sum(map(sum, missing)) / (len(both) * layers))
        counts = [sum(row.count(m) for row in missing) for m in range(top_k + 1)]
        assert r.expert_counts.tolist() == counts
        per_layer = [sum(row[k] > 0 for row in missing) / len(both) for k in range(layers)]
        assert r.per_layer.tolist() == pytest.approx(per_layer)
        assert r.sequence_mean.tolist() == pytest.approx(means)
        assert r.sequence == pytest.approx(sum(means) / len(means))


def test_wide_ids_are_compared_whole() -> None:
    a, b = (trace(torch.tensor([[[id_, 1]]]), experts=512) for id_ in (300, 300 - 256))
    assert routing_disagreement(a, b).experts == 1


def test_a_repeated_id_is_a_smaller_set() -> None:
    """A zero-filled row does not agree because every one of its ids is found."""
    filled, real = trace(torch.tensor([[[0, 0]]])), trace(torch.tensor([[[0, 1]]]))
    assert routing_disagreement(filled, real).routers == 1
    assert routing_disagreement(real, filled).experts == 1


def test_rows_are_compared_a_few_at_a_time(monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(50, 9, generator=generator).argsort(1)[:, :4] for _ in range(2))
    expected = differing_experts(a, b)
    monkeypatch.setattr(routing, "MAX_PAIRS", 3 * 16)
    assert torch.equal(differing_experts(a, b), expected)
    assert expected.tolist() == [
        len(set(x) - set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]


def test_without_segment_there_are_no_sequences() -> None:
    a = trace(torch.tensor([[[0, 1]]]))
    r = routing_disagreement(a, a)
    assert r.routers == r.tokens == r.experts == 0
    assert math.isnan(r.sequence)
    assert len(r.sequence_mean) == 0


def test_incomparable_traces_are_refused() -> None:
    a = trace(torch.zeros(2, 3, 2))
    others = {
        "slots": trace(torch.zeros(3, 3, 2)),
        "layers": RoutingTrace(a.ids, a.valid, (0, 1, 5), 8),
        "num_experts": trace(torch.zeros(2, 3, 2), experts=16),
        "top_k": trace(torch.zeros(2, 3, 1)),
    }
    for field, other in others.items():
        with pytest.raises(UsageError, match=f"routing_disagreement: {field} differ"):
            routing_disagreement(a, other)
    invalid = trace(torch.zeros(2, 3, 2), valid=torch.zeros(2, dtype=torch.bool))
    with pytest.raises(UsageError, match="none of 2 slots is valid in both"):
        routing_disagreement(a, invalid)
