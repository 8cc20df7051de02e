"""Routes in trainers' layouts, against positions that were laid out by hand."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import UsageError
from onepolicy.integrations.core.layout import (
    contiguous_slice,
    fit,
    packed,
    sequence_first,
    zigzag_rows,
)
from onepolicy.types import RouteSpan, RoutingTrace


def numbered(rows: int, first: int = 0) -> RoutingTrace:
    """Return a trace whose row r names the experts first + r and first + r + 100."""
    number = first + torch.arange(rows)
    ids = torch.stack([number, number + 100], 1)[:, None].to(torch.uint8)
    return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), (0,), 200)


def numbers(trace: RoutingTrace) -> list[int]:
    """Return the number of every row, -1 for an invalid one."""
    return torch.where(trace.valid, trace.ids[:, 0, 0].int(), -1).tolist()


def test_fit_cuts_at_the_end_and_appends_invalid_rows():
    assert numbers(fit(numbered(4), 2)) == [0, 1]
    assert numbers(fit(numbered(2), 4)) == [0, 1, -1, -1]
    assert fit(numbered(3), 3) == numbered(3)
    with pytest.raises(UsageError, match="rows is -1"):
        fit(numbered(3), -1)


def test_fit_keeps_spans_weights_and_origin():
    spans = (RouteSpan(0, 2, "prefill", 7), RouteSpan(2, 1, "decode", 7))
    trace = dataclasses.replace(numbered(3), spans=spans, weights=torch.rand(3, 1, 2))
    longer, shorter = fit(trace, 5), fit(trace, 1)
    assert longer.spans == trace.spans
    assert longer.weights.shape == (5, 1, 2)
    assert shorter.spans == (RouteSpan(0, 1, "prefill", 7),)
    assert longer.origin == trace.origin


def test_packed_samples_have_their_last_token_and_the_padding_native():
    samples = [numbered(2), numbered(3, first=10)]  # of 3 tokens, and of 3 with its last row
    assert numbers(packed(samples, [3, 3])) == [0, 1, -1, 10, 11, 12]
    assert numbers(packed(samples, [3, 3], rows=8)) == [0, 1, -1, 10, 11, 12, -1, -1]


def test_packed_refuses_what_cannot_be_the_samples():
    for lengths, rows, message in (
        ([3], None, "2 traces for 1 samples"),
        ([3, 5], None, "sample 1 has 5 tokens but 3 routing rows"),
        ([3, 3], 5, "6 tokens do not fit into rows=5"),
    ):
        with pytest.raises(UsageError, match=message):
            packed([numbered(2), numbered(3)], lengths, rows)


def test_contiguous_slices():
    assert numbers(contiguous_slice(numbered(6), 1, 3)) == [2, 3]
    with pytest.raises(UsageError, match=r"7 rows cannot be split over 3 ranks.*fit\(trace, 9\)"):
        contiguous_slice(numbered(7), 0, 3)
    with pytest.raises(UsageError, match="rank is 3, expected 0 to 2"):
        contiguous_slice(numbered(6), 3, 3)


def test_zigzag_rows_of_two_samples():
    # Two ranks: four chunks a sample; rank 0 has the first and the last, rank 1 the two inner ones.
    assert zigzag_rows([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag_rows([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]
    assert zigzag_rows([], 0, 2).tolist() == []
    with pytest.raises(UsageError, match="sample 1 has 6 tokens, no multiple of 2 x 2"):
        zigzag_rows([8, 6], 0, 2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_all_ranks_together_have_every_row_once(chunks: list[int], ranks: int):
    lengths = [2 * ranks * chunk for chunk in chunks]
    rows = torch.cat([zigzag_rows(lengths, rank, ranks) for rank in range(ranks)])
    assert sorted(rows.tolist()) == list(range(sum(lengths)))


def test_sequence_first():
    # Samples 0, 1, 2 and 3, 4, 5: the first tokens of both samples come first.
    assert numbers(sequence_first(numbered(6), 2)) == [0, 3, 1, 4, 2, 5]
    with pytest.raises(UsageError, match="6 rows are not those of 4 samples"):
        sequence_first(numbered(6), 4)
