"""One statistics object: hand-computed sums, the same bits for any split, nothing overflows."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.record import statistics
from onepolicy.record.means import Mean, means_by
from onepolicy.record.statistics import UNIT, RowSums, Statistics, exact_sums
from support.examples import examples

SCALES = st.sampled_from([0.0, 1e-7, 1e-3, 0.3, 5.0, 400.0])


def tokens(seed: int, lengths: list[int], scale: float):
    """Return trainer, rollout and row of rows whose log-ratios have this spread."""
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(lengths)), lengths)
    rollout = -rng.exponential(1.0, len(row)) - 3 * scale
    return np.minimum(rollout + scale * rng.normal(size=len(row)), 0.0), rollout, row


def state(found: Statistics):
    return found.totals, found.rho, found.largest, found.tokens, found.differing, found.sequences


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=9),
    scale=SCALES,
    data=st.data(),
)
@examples(60)
def test_any_split_and_any_order_of_rows_give_the_same_bits(seed, lengths, scale, data) -> None:
    trainer, rollout, row = tokens(seed, lengths, scale)
    whole = Statistics.of(trainer, rollout, row)
    order = data.draw(st.permutations(range(len(lengths))))
    part_of = data.draw(st.lists(st.integers(0, 3), min_size=len(order), max_size=len(order)))
    found = None
    for part in sorted(set(part_of)):
        rows = [each for each, chosen in zip(order, part_of, strict=True) if chosen == part]
        at = np.concatenate([np.flatnonzero(row == each) for each in rows])
        ids = np.repeat(np.arange(len(rows)), [lengths[each] for each in rows])
        more = Statistics.of(trainer[at], rollout[at], ids)
        found = more if found is None else more + found
    assert found is not None
    assert state(found) == state(whole)
    assert repr(found.statistics()) == repr(whole.statistics())


def test_blocks_of_rows_give_the_same_bits(monkeypatch, subtests) -> None:
    given = tokens(3, [5, 1, 7, 3, 16, 2], 0.3)
    whole = state(Statistics.of(*given))
    for size in (1, 4, 6, 13, 33, 34):
        monkeypatch.setattr(statistics, "BLOCK_TOKENS", size)
        with subtests.test(size=size):
            assert state(Statistics.of(*given)) == whole


def test_rows_may_be_interleaved_and_have_any_number() -> None:
    trainer, rollout, row = tokens(0, [5, 7, 3], 0.3)
    order = np.array([0, 5, 12, 1, 6, 13, 2, 7, 14, 3, 8, 4, 9, 10, 11])
    mixed = Statistics.of(trainer[order], rollout[order], 7 - row[order])
    assert state(mixed) == state(Statistics.of(trainer, rollout, row))


@given(
    st.lists(st.floats(-1e30, 1e30, allow_nan=False), min_size=1, max_size=30),
    st.integers(1, 9),
)
@examples(60)
def test_sums_are_exact(values, most) -> None:
    values = [value for value in values if abs(value) > 1e-50 or value == 0] or [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "MOST_ROWS", most)
        (total,) = exact_sums(np.array([values]))
    assert Fraction(total, UNIT) == sum(map(Fraction, values))


def test_two_rows_by_hand() -> None:
    """Ratios 1, 4, 1/4 and 2, 2: E.g. the sums of k1 by row are 0 and -2 log 2."""
    ratios = np.array([1, 4, 1 / 4, 2, 2])
    found = Statistics.of(np.log(ratios) - 5, np.full(5, -5.0), np.array([0, 0, 0, 1, 1]))
    numbers = found.statistics()
    assert (found.tokens, found.differing, found.sequences) == (5, 4, 2)
    assert numbers["k1"] == pytest.approx(-2 * math.log(2) / 5)
    assert numbers["k2"] == pytest.approx(5 * math.log(2) ** 2 / 5)
    assert numbers["k3"] == pytest.approx(9.25 / 5 - 1 - 2 * math.log(2) / 5)
    assert numbers["mean_rho"] == pytest.approx(9.25 / 5)
    assert numbers["chi2"] == pytest.approx((1 + 16 + 1 / 16 + 8) / 5 - 1)
    assert numbers["ess"] == pytest.approx(9.25**2 / (5 * (25 + 1 / 16)))
    assert numbers["ppl_ratio"] == pytest.approx((1 + 1 / 2) / 2 * 1.0)
    assert (numbers["f1.25"], numbers["f5"]) == (4 / 5, 0)
    # of k1: rows differ from their share of the mean by 6 log 2 / 5 either way
    assert numbers["k1_error"] == pytest.approx(math.sqrt(2 * 2) * 6 * math.log(2) / 25)
    others = np.array([1, 1, 1, 1, 1 + 1e-9])
    correlation = np.corrcoef(ratios, others)[0, 1]
    assert math.isnan(numbers["pearson"])
    near = Statistics.of(np.log(ratios) - 5, np.log(others) - 5, np.array([0, 0, 0, 1, 1]))
    assert near.pearson == pytest.approx(correlation, rel=1e-5)


@pytest.mark.parametrize("shift", [-60.0, -4.0, -1e-4])
def test_correlation_of_nearly_equal_probabilities_loses_nothing(shift) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 600)) * 1e-6
    p, q = (math.exp(shift) * (1 + each) for each in (noise[0], noise[0] + noise[1]))
    row = np.repeat(np.arange(30), 20)
    exact = np.corrcoef(noise[0], noise[0] + noise[1])[0, 1]
    assert Statistics.of(np.log(p), np.log(q), row).pearson == pytest.approx(exact, abs=1e-7)


def test_what_overflows_is_infinite_and_ess_is_not() -> None:
    rollout, row = np.array([-2000.0, -5.0, -5.0]), np.array([0, 0, 1])
    found = Statistics.of(np.array([-1.0, -5.0, -6.0]), rollout, row)
    assert found.k3 == found.chi2 == math.inf
    assert found.ess == pytest.approx(1 / 3)  # one token carries all the weight
    assert math.isnan(found.standard_error("k3"))
    both = found + Statistics.of(rollout, rollout, row)
    assert both.k3 == math.inf
    assert both.ess == pytest.approx(1 / 6)
    tiny = Statistics.of(rollout - 3000, rollout, row)
    assert tiny.ess == pytest.approx(1.0)
    assert (tiny + tiny).ess == pytest.approx(1.0)


def test_rows_of_a_table_are_selected() -> None:
    trainer, rollout, row = tokens(1, [5, 7, 3], 0.3)
    table = RowSums.of(trainer, rollout, row)
    parts = [Statistics.of_rows(table.at(np.arange(3) == i)) for i in range(3)]
    assert state(parts[2] + parts[0] + parts[1]) == state(Statistics.of_rows(table))


def test_standard_errors_treat_a_sequence_as_one_draw() -> None:
    """The spread of k3 over 300 dumps of 40 sequences with noises of their own is its error."""
    rng = np.random.default_rng(0)
    row, found = np.repeat(np.arange(40), 25), []
    for _ in range(300):
        scale = 0.3 * rng.random(40)[row]
        rollout = -rng.random(1000) - 3
        found.append(Statistics.of(rollout + scale * rng.normal(size=1000), rollout, row))
    spread = float(np.std([each.k3 for each in found]))
    errors = [each.standard_error("k3") for each in found]
    assert np.mean(errors) == pytest.approx(spread, rel=0.1)
    assert math.isnan(Statistics.of(rollout[:9] / 2, rollout[:9], row[:9]).standard_error("k3"))


@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 20), min_size=2, max_size=6))
@examples(30)
def test_means_by_label_merge_exactly(seed, lengths) -> None:
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(lengths)), lengths)
    values, label = rng.exponential(size=len(row)), rng.integers(0, 3, len(row))
    whole = means_by(label, values, row)
    parts = [means_by(label[at], values[at], row[at]) for at in (row >= 1, row < 1)]
    for name, mean in whole.items():
        assert parts[0].get(name, Mean()) + parts[1].get(name, Mean()) == mean
        chosen = values[label == name]
        assert mean.mean == pytest.approx(chosen.mean())
        if len(chosen) > 1:
            wanted = chosen.std() / math.sqrt(len(chosen))
            assert mean.error == pytest.approx(wanted, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e300, -3e4])
def test_a_finite_filling_breaks_no_statistic(fill):
    """Log-probabilities of a lowest float are finite, so they count."""
    trainer, rollout = np.array([-1.0, fill, -2.0]), np.array([-1.1, -1.0, -2.0])
    found = Statistics.of(trainer, rollout, np.array([0, 0, 1]))
    assert found.ess == pytest.approx((math.exp(0.1) + 1) ** 2 / 3 / (math.exp(0.2) + 1))
    assert found.f2 == pytest.approx(1 / 3)
    alone = Statistics.of(np.array([fill]), np.array([-1.0]), np.array([0]))
    assert alone.ess == pytest.approx(1)
    assert Statistics.of(-trainer, rollout, np.array([0, 0, 1])).ess == pytest.approx(1 / 3)
    found.statistics(), alone.statistics()
