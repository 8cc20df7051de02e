"""The picture of `onepolicy compare`, drawn from hand-made logs."""

import math

import numpy as np
import pytest

from onepolicy.report.arm_run import ArmRun
from onepolicy.report.comparison_figure import picture, running_mean
from onepolicy.report.page import DARK, LIGHT

LABELS = {"off": "without replay", "r3": "with replay"}


def run(name, k3, norm=1.0, seed=0):
    row = {"train/reward": 0.5, "train/grad_norm": norm}
    return ArmRun(name, seed, [row | {"mismatch/k3": value} for value in k3], LABELS.get(name, ""))


def drawn(*runs):
    """Return the figure's layout and its traces by (name, panel)."""
    figure = picture(runs, "t")
    traces = {}
    for each in figure.data:
        traces.setdefault((each["name"], each["yaxis"], each.get("mode")), []).append(each)
    return figure.layout, traces


def test_a_bar_an_arm_counts_the_steps_of_all_its_seeds():
    _, traces = drawn(
        *(run("off", [2e-3, 1e-5, 1e-5, None], seed=seed) for seed in (0, 1)),
        *(run("r3", [1e-5] * 4, seed=seed) for seed in (0, 1)),
    )
    ((bars,),) = [found for key, found in traces.items() if key[0].startswith("above")]
    assert bars["x"] == [2 / 6, 0.0]
    assert bars["text"] == [" without replay: 2 of 6 steps", " with replay: 0 of 8 steps"]


def test_a_zero_is_a_tick_at_the_edge_and_no_line_leads_to_it():
    """The gradient norm of a step without signal is 0, which a log axis does not have."""
    norms = [2.0, 0.0] * 40
    rows = [{"train/reward": 0.5, "mismatch/k3": 1e-3, "train/grad_norm": norm} for norm in norms]
    layout, traces = drawn(ArmRun("off", 0, rows), run("r3", [1e-5] * 80))
    (dots,) = traces["off", "y4", "markers"]
    assert dots["marker"]["symbol"] == ["circle", "line-ns-open"] * 40
    assert dots["y"][1] == layout["yaxis4"]["tickvals"][0]
    (mean,) = traces["off", "y4", "lines"]
    assert set(mean["y"][7:]) == {1.0}  # of 8 steps


def test_the_ends_of_the_lines_are_named_apart_and_the_limits_by_their_meaning():
    layout, _ = drawn(run("off", [1.01e-3] * 80), run("r3", [1e-3] * 80))
    texts = [each["text"] for each in layout["annotations"]]
    assert texts == [
        "1e-4, too small to matter below",
        "1e-3, act above",
        "<b>without replay</b>",
        "off",
        "<b>with replay</b>",
        "r3",
    ]
    above, below = (layout["annotations"][at]["y"] for at in (2, 4))
    low, high = layout["yaxis2"]["range"]
    assert (above - below) / (high - low) * 330 == pytest.approx(34)
    assert [each["y0"] for each in layout["shapes"]] == [1e-4, 1e-3]
    assert low < -4
    assert high > -3  # both limits are always seen


def test_a_running_mean_begins_with_its_first_whole_window():
    values = np.array([1.0, 3.0, math.nan, 5.0])
    assert running_mean(values, 2)[1:] == [2.0, 3.0, 5.0]
    assert math.isnan(running_mean(values, 2)[0])
    assert math.isnan(running_mean(np.array([math.nan, math.nan]), 1)[1])


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
    _, traces = drawn(*(run(name, [1e-3] * 8) for name in "abcdef"))
    lines = [found[0]["line"] for (_, panel, mode), found in traces.items() if mode == "lines"]
    assert len({(each["color"], each["dash"]) for each in lines}) == 6
