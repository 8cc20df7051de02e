"""Intervals over blocks of steps: their ends by hand, and how often they hold the truth."""

import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest

from onepolicy.report import contrast
from onepolicy.report.contrast import FEWEST_STEPS, LONGEST_BLOCK, interval


def difference(means):
    return means[1] - means[0]


def test_tails_are_those_of_a_wider_student_t(monkeypatch, subtests):
    """The draws are evenly spaced from 0 to 1, so the interval ends at its tails."""
    monkeypatch.setattr(contrast, "DRAWS", 50_001)

    def even(means):
        return np.linspace(0, 1, means.shape[1]) if means.ndim > 1 else 0.5

    for steps, count, t in [
        (FEWEST_STEPS, 6, 2.5706),
        (20 * LONGEST_BLOCK, 20, 2.0930),
        (40 * LONGEST_BLOCK, 40, 2.0227),
    ]:
        with subtests.test(count=count):
            found = interval(np.zeros((2, steps)), even)
            wanted = NormalDist().cdf(-t * (count / (count - 1)) ** 0.5)
            assert (found.low, 1 - found.high) == pytest.approx((wanted, wanted), rel=0.05)


def test_every_step_is_drawn_equally_often():
    """A jump in the last step moves the middle of the interval as far as one in the middle."""
    widths = []
    for at in (0, 30, 59):
        other = np.zeros(60)
        other[at] = 1.0
        found = interval(np.stack([np.zeros(60), other]), difference)
        widths.append(found.high)
        assert found.low == 0
    assert [widths[0], widths[2]] == pytest.approx([widths[1]] * 2, rel=0.35)


@pytest.mark.full
def test_intervals_hold_the_truth_19_times_in_20(monkeypatch, subtests):
    monkeypatch.setattr(contrast, "DRAWS", 2000)
    for steps in (FEWEST_STEPS, 60, 200):
        random, held, runs = np.random.default_rng(steps), 0, 200
        for _ in range(runs):
            found = interval(random.standard_normal((2, steps)), difference)
            held += not found.excludes(0)
        with subtests.test(steps=steps):
            assert 0.91 <= held / runs <= 0.985  # a standard error is 0.015


def test_the_draws_of_a_long_run_are_not_held_at_once(monkeypatch):
    """The numbers are those of all draws at once, to the bit."""
    pairs = np.random.default_rng(1).standard_normal((2, 600))
    peaks, found = [], []
    for at_once in (2**40, 2**12):
        monkeypatch.setattr(contrast, "DRAWN_AT_ONCE", at_once)
        tracemalloc.start()
        found.append(interval(pairs, difference))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert found[0] == found[1]
    assert peaks[1] < peaks[0] / 10


def test_two_equal_curves_have_an_interval_of_no_width():
    values = np.random.default_rng(0).standard_normal(80)
    found = interval(np.stack([values, values]), difference)
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert not found.excludes(0)
