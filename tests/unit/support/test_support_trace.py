"""SupportTrace: every way to make one gives its sets, and every cut of it keeps them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import UsageError
from onepolicy.support.trace import SupportTrace
from onepolicy.types import concat_given

SETS = st.lists(st.lists(st.integers(0, 40), max_size=6, unique=True), min_size=1, max_size=12)


def test_by_hand():
    trace = SupportTrace.from_sets([[7, 3], [], [5]], [[-0.2, -1.7], [], [0.0]])
    assert trace.ids.tolist() == [3, 7, 5]
    assert trace.offsets.tolist() == [0, 2, 2, 3]
    assert trace.logp.tolist() == pytest.approx([-1.7, -0.2, 0.0])
    assert trace.captured.tolist() == [True, False, True]
    assert trace.slot_of.tolist() == [0, 0, 2]
    assert trace.contains(torch.tensor([7, 0, 4])).tolist() == [True, False, False]
    assert trace.at(torch.tensor([2, 0, 2])).as_sets() == [[5], [3, 7], [5]]
    assert trace.at(slice(1, 3)).logp.tolist() == [0.0]


def padded(sets):
    width = max(map(len, sets)) + 1
    return torch.tensor([[*each, *[-1] * (width - len(each))] for each in sets])


@given(SETS, st.data())
def test_all_forms_are_one(sets, data):
    """Lists, ids with counts, padded rows and masks give one trace, which splits and joins."""
    trace = SupportTrace.from_sets(sets)
    assert trace.as_sets() == [sorted(each) for each in sets]
    joined = torch.tensor([token for each in sets for token in each], dtype=torch.int64)
    mask = torch.zeros(len(sets), 41, dtype=torch.bool)
    for slot, each in enumerate(sets):
        mask[slot, each] = True
    forms = [
        SupportTrace.from_counts(joined, torch.tensor([len(each) for each in sets])),
        SupportTrace.from_padded(padded(sets)),
        SupportTrace.from_mask(mask),
        SupportTrace.join(trace.split()),
    ]
    assert all(form == trace for form in forms)
    valued = SupportTrace.from_sets(sets, [[-float(token) for token in each] for each in sets])
    assert SupportTrace.join(valued.split()) == valued or not len(valued.ids)
    assert valued.without_logp() == trace
    cut = data.draw(st.integers(0, len(sets)))
    assert SupportTrace.concat([trace.at(slice(0, cut)), trace.at(slice(cut, None))]) == trace
    order = torch.tensor(data.draw(st.permutations(range(len(sets)))))
    assert trace.at(order).as_sets() == [sorted(sets[slot]) for slot in order.tolist()]


def test_an_engine_that_returns_log_probabilities():
    """Of four likeliest tokens after top-k 3, the last one is outside."""
    logp = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.9, 0.1, 0.0, 0.0]]).log()
    trace = SupportTrace.from_logp(torch.tensor([[4, 2, 9, 1], [8, 6, 5, 1]]), logp)
    assert trace.as_sets() == [[2, 4, 9], [6, 8]]
    assert trace.logp.exp().tolist() == pytest.approx([0.3, 0.5, 0.2, 0.1, 0.9])
    with pytest.raises(
        UsageError, match=r"3 tokens of slot 0 have a probability of 0.9\d+ together"
    ):
        SupportTrace.from_logp(torch.tensor([[4, 2, 9]]), torch.tensor([[0.5, 0.3, 0.1]]).log())


def test_parts_without_a_set_are_not_filled_in():
    trace = SupportTrace.from_sets([[1]])
    assert concat_given([None, None]) is None
    assert concat_given([trace, trace]).as_sets() == [[1], [1]]
    with pytest.raises(UsageError, match="1 of 2 parts have no SupportTrace"):
        concat_given([trace, None])
    assert SupportTrace.concat([trace, SupportTrace.missing(2)]).as_sets() == [[1], [], []]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SupportTrace.from_sets([[1], [2, 2]]), "slot 1 has token 2 twice"),
        (lambda: SupportTrace.from_sets([[-1]]), "token ids -1 to -1"),
        (lambda: SupportTrace.from_sets([[1]], [[0.0, 0.0]]), "slot 0 has 1 token ids and 2 log"),
        (lambda: SupportTrace.from_sets([[1], [2]], [[0.0]]), "slot 1 has 1 token ids and 0 log"),
        (
            lambda: SupportTrace.from_counts(
                torch.tensor([1, 2]), torch.tensor([1, 1]), logp=torch.zeros(3)
            ),
            r"ids of shape \[2\], log-probabilities of \[3\]",
        ),
        (
            lambda: SupportTrace.from_padded(torch.tensor([[1, -1]]), logp=torch.zeros(1, 1)),
            r"ids of shape \[1, 2\], log-probabilities of \[1, 1\]",
        ),
        (
            lambda: SupportTrace.from_logp(
                torch.tensor([[1, 2]]), torch.tensor([[0.0, float("nan")]])
            ),
            "tokens of slot 0 have a probability of nan",
        ),
        (
            lambda: SupportTrace.from_counts(torch.tensor([1, 2]), torch.tensor([3])),
            "2 ids, but the counts of 1 slots add up to 3",
        ),
        (lambda: SupportTrace([[1]], torch.tensor([0, 1])), "ids is list, expected torch.int32"),
        (
            lambda: SupportTrace(torch.tensor([1], dtype=torch.int32), torch.tensor([0.0, 1.0])),
            "offsets is float32",
        ),
        (lambda: SupportTrace.concat([]), "no traces"),
    ],
)
def test_wrong_input_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_values_that_are_not_finite_are_named():
    trace = SupportTrace.from_sets([[7, 3], [5]], [[-0.2, float("nan")], [0.0]])
    with pytest.raises(UsageError, match="nan of token 3, in the set of slot 0"):
        trace.check_values(8)
    trace.without_logp().check_values(8)


@pytest.mark.parametrize(
    ("ids", "words"), [([5, 3], "3 stands after 5"), ([4, 4], "4 stands after 4")]
)
def test_ids_of_a_set_that_do_not_ascend_are_named(ids, words):
    """A set may begin below the end of the one before it."""
    trace = SupportTrace(torch.tensor([2, 7, *ids]).int(), torch.tensor([0, 2, 2, 4]))
    with pytest.raises(UsageError, match=f"{words} in the set of slot 2"):
        trace.check_values(8)
    SupportTrace(torch.tensor([2, 7, 3]).int(), torch.tensor([0, 2, 2, 3])).check_values(8)


def test_values_of_any_kind_are_split():
    ids, ends = torch.tensor([3, 5, 1]).int(), torch.tensor([0, 2, 3])
    logp = torch.tensor([-0.5, -1.0, 0.0], dtype=torch.bfloat16, requires_grad=True)
    sets = SupportTrace(ids, ends, logp).split()
    assert [each.logp.tolist() for each in sets] == [[-0.5, -1.0], [0.0]]
