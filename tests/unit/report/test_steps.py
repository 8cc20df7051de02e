"""Curves over steps, drawn from hand-made values, and the figures of `onepolicy compare`."""

import math

import numpy as np
import pytest

from onepolicy.report.comparison import figures
from onepolicy.report.contrast import ArmRun
from onepolicy.report.figures.parts import ARMS, ROLLOUT, TRAINER, Series
from onepolicy.report.figures.steps import (
    over_steps,
    running_mean,
    seconds,
    step_axis,
    window_of,
)
from onepolicy.report.page import DARK, LIGHT

LABELS = {"off": "without replay", "r3": "with replay"}


def run(name, k3, norm=1.0, seed=0):
    row = {"train/reward": 0.5, "train/grad_norm": norm}
    rows = [row | {"step": at, "mismatch/k3": value} for at, value in enumerate(k3, 1)]
    return ArmRun(name, seed, rows, LABELS.get(name, ""))


def drawn(*runs):
    """Return the figures of a comparison by name."""
    return {each.name: each for each in figures(runs)}


def test_a_zero_is_a_tick_at_the_edge_and_no_line_leads_to_it():
    """The gradient norm of a step without signal is 0, which a log axis does not have."""
    norms = [2.0, 0.0] * 40
    row = {"train/reward": 0.5, "mismatch/k3": 1e-3}
    rows = [row | {"step": at, "train/grad_norm": norm} for at, norm in enumerate(norms, 1)]
    figure = drawn(ArmRun("off", 0, rows), run("r3", [1e-5] * 80))["grad_norm"]
    dots, mean = figure.data[:2]
    assert dots["marker"]["symbol"] == ["circle", "line-ns-open"] * 40
    assert dots["y"][1] == figure.layout["yaxis"]["tickvals"][0]
    assert set(mean["y"][7:]) == {1.0}  # of 8 steps


def test_a_log_axis_of_any_height_has_at_most_ten_labels():
    for decades in range(1, 40):
        series = [Series("a", ROLLOUT, [10.0**-decades, 1.0])]
        axis = over_steps("x", "t", "", series, "u", log=True).layout["yaxis"]
        assert 2 <= len(axis["tickvals"]) <= 10, decades


def test_few_steps_are_joined_but_not_over_a_step_without_a_value():
    series = [Series("a", ROLLOUT, [1.0, math.nan, 0.0, 3.0], [1, 2, 3, 4])]
    dots, line = over_steps("x", "t", "", series, "u", log=True).data
    assert dots["marker"]["symbol"][2] == "line-ns-open"
    assert [math.isnan(value) for value in line["y"]] == [False, True, True, False]
    _, line = over_steps("x", "t", "", series, "u").data
    assert line["y"][2] == 0.0


def test_points_are_faint_behind_their_mean_and_a_flat_curve_has_an_axis():
    few, many = (Series("a", ROLLOUT, [0.0] * count) for count in (19, 20))
    figure = over_steps("x", "t", "note.", [many], "u")
    dots, mean = figure.data
    assert dots["marker"]["opacity"] < 0.5 < mean["line"]["width"]
    assert figure.note == "note. A dot is a step, the line the mean of 2 steps."
    assert figure.layout["yaxis"]["range"] == [-0.06, 1.06]
    dots, _ = over_steps("x", "t", "", [few], "u").data
    assert dots["marker"]["opacity"] == 1


def test_the_ends_of_the_lines_are_named_apart_and_the_limits_by_their_meaning():
    layout = drawn(run("off", [1.01e-3] * 80), run("r3", [1e-3] * 80))["k3"].layout
    texts = [each["text"] for each in layout["annotations"]]
    limits = ["1e-4, too small to matter below", "1e-3, act above"]
    assert texts == [*limits, "<b>without replay</b>", "<b>with replay</b>"]
    above, below = (layout["annotations"][at]["y"] for at in (2, 3))
    low, high = layout["yaxis"]["range"]
    assert (above - below) / (high - low) * 270 == pytest.approx(15)
    assert [each["y0"] for each in layout["shapes"]] == [1e-4, 1e-3]
    assert low < -4
    assert high > -3  # both limits are always seen
    flat = [Series(name, TRAINER, [0.0] * 4) for name in "abc"]
    names = over_steps("x", "t", "", flat, "u").layout["annotations"]
    places = [each["y"] for each in names]
    assert places == sorted(places, reverse=True)
    assert len(set(places)) == 3


def test_a_running_mean_begins_with_its_first_whole_window():
    values = np.array([1.0, 3.0, math.nan, 5.0])
    assert running_mean(values, 2)[1:].tolist() == [2.0, 3.0, 5.0]
    assert math.isnan(running_mean(values, 2)[0])
    assert math.isnan(running_mean(np.array([math.nan, math.nan]), 1)[1])
    exploded = running_mean(np.array([1.0, 1.0, math.inf, 1.0, 1.0]), 2)
    assert np.isnan(exploded).tolist() == [True, False, True, True, False]  # a gap


def test_steps_below_0_stay_inside_the_axis():
    low, high = step_axis([Series("a", ARMS[0], [1.0, 2.0], [-5, -4])])["range"]
    assert low < -5 < -4 < high


def test_other_is_the_time_of_no_part():
    parts = {"update": np.array([1.0, 1.0]), "rollout": np.array([2.0, 4.0])}
    figure = seconds([1, 2], np.array([4.0, 5.0]), parts)
    assert {each["name"]: each["y"] for each in figure.data} == {
        "rollout": [2.0, 4.0],
        "update": [1.0, 1.0],
        "other": [1.0, 0.0],
    }
    assert figure.title == "The largest part of a step is rollout: 67%"


def test_no_step_is_too_large_for_the_axis():
    assert step_axis([Series("a", ROLLOUT, [1.0], [10**18])])["range"][1] > 10**18


def luminance(color):
    """Return the relative luminance of WCAG 2 of #rrggbb."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_the_two_arms_differ_in_grey_and_from_the_paper(palette):
    def contrast(first, other):
        lower, higher = sorted(luminance(palette[name]) for name in (first, other))
        return (higher + 0.05) / (lower + 0.05)

    assert contrast("arm-first", "arm-other") > 2
    assert min(contrast(name, "paper") for name in ("arm-first", "arm-other")) > 3


def test_six_arms_look_different():
    assert len({(each.color, each.dash) for each in ARMS}) == 6
    lines = drawn(*(run(name, [1e-3] * 8) for name in "abcdef"))["reward"].data[1::2]
    assert len({(each["line"]["color"], each["line"]["dash"]) for each in lines}) == 6


def test_a_mean_is_never_of_more_steps_than_forty():
    """A long run would have windows of thousands of steps, each read anew."""
    assert [window_of(np.zeros(count)) for count in (19, 20, 399, 400, 200_000)] == [
        1,
        2,
        39,
        40,
        40,
    ]


def test_a_forks_few_steps_fill_the_width():
    long, fork = (Series("a", ROLLOUT, [0.0] * 3, at) for at in ([2, 50, 99], [200, 250, 260]))
    assert step_axis([long])["range"] == pytest.approx([-0.99, 100.98])
    assert step_axis([fork])["range"] == pytest.approx([199.4, 261.2])
    assert step_axis([long, fork])["range"][0] < 0
