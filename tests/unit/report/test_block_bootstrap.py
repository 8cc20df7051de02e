"""Intervals over blocks of steps: their ends by hand, and how often they hold the truth."""

import numpy as np
import pytest

from onepolicy.report.block_bootstrap import FEWEST_STEPS, _tail, interval


def difference(means):
    return means[1] - means[0]


@pytest.mark.parametrize(("count", "t"), [(6, 2.5706), (20, 2.0930), (40, 2.0227)])
def test_tails_are_those_of_a_wider_student_t(count, t):
    from statistics import NormalDist

    wanted = NormalDist().cdf(-t * (count / (count - 1)) ** 0.5)
    assert _tail(count) == pytest.approx(wanted, rel=0.05)


def test_every_step_is_drawn_equally_often():
    """A jump in the last step moves the middle of the interval as far as one in the middle."""
    steps = 60
    widths = []
    for at in (0, 30, 59):
        other = np.zeros(steps)
        other[at] = 1.0
        found = interval(np.stack([np.zeros(steps), other]), difference)
        widths.append(found.high)
        assert found.low == 0
    assert widths[0] == pytest.approx(widths[1], rel=0.35)
    assert widths[2] == pytest.approx(widths[1], rel=0.35)


@pytest.mark.parametrize("steps", [FEWEST_STEPS, 60, 200])
def test_intervals_hold_the_truth_19_times_in_20(steps):
    random = np.random.default_rng(steps)
    held, runs = 0, 200
    for _ in range(runs):
        found = interval(random.standard_normal((2, steps)), difference)
        held += not found.excludes(0)
    assert 0.91 <= held / runs <= 0.985  # a standard error is 0.015


def test_two_equal_curves_have_an_interval_of_no_width():
    values = np.random.default_rng(0).standard_normal(80)
    found = interval(np.stack([values, values]), difference)
    assert (found.value, found.low, found.high) == (0, 0, 0)
    assert not found.excludes(0)
