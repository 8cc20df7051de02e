"""RoutingTrace: cutting, joining and spans."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.types import RouteSpan, RoutingTrace, id_dtype

LAYERS = (1, 2, 5)


def _trace(
    rows: int, *, start: int = 0, spans: tuple[RouteSpan, ...] = (), experts: int = 64
) -> RoutingTrace:
    """Return a trace whose row t of layer l has experts t + start + l and the next one."""
    base = (torch.arange(rows)[:, None] + torch.arange(len(LAYERS)) + start) % (experts - 1)
    ids = torch.stack([base, base + 1], -1).to(id_dtype(experts))
    return RoutingTrace(ids, torch.arange(rows) % 3 != 0, LAYERS, experts, spans)


def test_dtype_is_the_smallest_that_holds_the_ids() -> None:
    assert id_dtype(256) == torch.uint8
    assert id_dtype(257) == torch.uint16


def test_shape_and_dtype_are_checked() -> None:
    good = _trace(4)
    assert (len(good), good.top_k) == (4, 2)
    # `where` takes a mask of bytes, indexing means something else by it
    for change, words in (
        ({"layers": (1, 2)}, "3 layers"),
        ({"valid": torch.ones(5, dtype=torch.bool)}, "valid"),
        ({"num_experts": 300}, "uint16"),
        ({"ids": good.ids.long()}, "int64"),
        ({"ids": good.ids[:, 0]}, r"expected \[T, L, K\]"),
        ({"valid": good.valid.byte()}, "uint8, expected bool"),
        ({"weights": torch.ones_like(good.ids)}, "floating"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(good, **change)


def test_rows_cuts_and_shifts_spans() -> None:
    """Rows [3, 9) keep one row of the first span, all of the second, none of the third."""
    rows = [(0, 4, "prefill", 1), (4, 5, "decode", 1), (9, 1, "decode", 2)]
    trace = _trace(10, spans=tuple(RouteSpan(*row) for row in rows))
    cut = trace.rows(3, 9)
    assert torch.equal(cut.ids, trace.ids[3:9])
    assert torch.equal(cut.valid, trace.valid[3:9])
    assert (cut.layers, cut.num_experts) == (trace.layers, trace.num_experts)
    assert cut.spans == (RouteSpan(0, 1, "prefill", 1), RouteSpan(1, 5, "decode", 1))
    assert trace.rows(4, 4).spans == ()
    assert len(trace.rows(4, 4)) == 0


def test_concat_shifts_spans() -> None:
    first = _trace(3, spans=(RouteSpan(0, 3, "prefill", 7),))
    second = _trace(2, start=9, spans=(RouteSpan(1, 1, "cache", 8),))
    joined = RoutingTrace.concat([first, second])
    assert torch.equal(joined.ids, torch.cat([first.ids, second.ids]))
    assert torch.equal(joined.valid, torch.cat([first.valid, second.valid]))
    assert joined.spans == (RouteSpan(0, 3, "prefill", 7), RouteSpan(4, 1, "cache", 8))


def test_concat_keeps_wide_ids() -> None:
    joined = RoutingTrace.concat([_trace(3, experts=300), _trace(2, start=280, experts=300)])
    assert joined.ids.dtype == torch.uint16
    assert joined.ids[3, 0, 0].item() == 280


def test_concat_of_different_models_is_refused() -> None:
    changes = ({"layers": (0, 1, 2)}, {"num_experts": 65}, {"ids": torch.zeros(2, 3, 3).byte()})
    for change in changes:
        with pytest.raises(ValueError, match="different models"):
            RoutingTrace.concat([_trace(2), dataclasses.replace(_trace(2), **change)])


@settings(max_examples=50)
@given(st.integers(1, 40), st.data())
def test_cutting_and_joining_gives_the_whole_back(rows: int, data: st.DataObject) -> None:
    """Every row keeps its ids, its validity, and the source and version of its span."""
    edges = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=5))})
    sources = st.sampled_from(["decode", "prefill", "cache", "reprefill"])
    spans = tuple(
        RouteSpan(a, b - a, data.draw(sources), i)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    )
    trace = _trace(rows, spans=spans)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=6))})
    joined = RoutingTrace.concat([trace.rows(a, b) for a, b in itertools.pairwise(cuts)])
    assert torch.equal(joined.ids, trace.ids)
    assert torch.equal(joined.valid, trace.valid)
    assert _per_row(joined) == _per_row(trace)


def _per_row(trace: RoutingTrace) -> list[tuple[str, int]]:
    out: list = [None] * len(trace)
    for span in trace.spans:
        for row in range(span.start, span.start + span.length):
            assert out[row] is None
            out[row] = (span.source, span.version)
    return out


def test_to_moves_ids_and_valid() -> None:
    moved = _trace(3).to("meta")
    assert (moved.ids.device.type, moved.valid.device.type) == ("meta", "meta")
