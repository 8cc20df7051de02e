"""What `onepolicy compare` says of arms: hand-made logs with known gaps."""

import json
import math
import warnings

import numpy as np
import pytest

from onepolicy.report.comparison import (
    ArmRun,
    contrast,
    contrasts,
    picture,
    rows_of_table,
    sentences_of,
    write_comparison,
)
from onepolicy.report.words import DASH


def run(name, k3, reward, seed=0, norm=1.0):
    """Return a run whose step t has k3[t], reward[t] and one gradient norm."""
    rows = [
        {"step": at, "train/reward": r, "mismatch/k3": k, "train/grad_norm": norm}
        for at, (k, r) in enumerate(zip(k3, reward, strict=True), 1)
    ]
    return ArmRun(name, seed, [{"step": 0, "eval/avg@4": 0.25}, *rows, {"eval/avg@4": 0.5}])


def noisy(mean, steps=80, seed=0):
    return (mean * np.exp(0.3 * np.random.default_rng(seed).standard_normal(steps))).tolist()


def test_ratio_and_difference_of_means():
    found = contrast(
        run("off", [2e-3, 4e-3] * 20, [0.0] * 20 + [0.5] * 20),
        run("r3", [1e-5, 2e-5] * 20, [1.0] * 20 + [0.25] * 20),
    )
    assert found.k3 == pytest.approx((3e-3, 1.5e-5))
    assert found.k3_ratio.value == pytest.approx(200)
    assert found.reward == (0.5, 0.25)  # of the second half
    assert found.reward_difference.value == -0.25


def test_the_interval_covers_the_ratio_and_narrows_with_steps():
    def width(steps):
        first = run("off", noisy(1e-3, steps, 1), [0.5] * steps)
        found = contrast(first, run("r3", noisy(1e-5, steps, 2), [0.5] * steps)).k3_ratio
        assert found.low < found.value < found.high
        return math.log(found.high / found.low)

    assert width(1600) < width(100) / 2


def test_blocks_widen_the_interval_of_a_slow_curve():
    """Steps one after the other are alike, and an interval over single steps would not know."""
    slow = (1e-3 * np.exp(np.repeat(np.random.default_rng(3).standard_normal(8), 20))).tolist()
    shuffled = np.random.default_rng(4).permutation(slow).tolist()
    flat = run("r3", [1e-5] * 160, [0.5] * 160)

    def width(values):
        found = contrast(run("off", values, [0.5] * 160), flat).k3_ratio
        return math.log(found.high / found.low)

    assert width(slow) > 1.5 * width(shuffled)


def test_sentences():
    more = [0.2] * 40 + [0.9, 0.8] * 20
    less = [0.2] * 40 + [0.3, 0.2] * 20
    found = contrast(run("off", noisy(3e-3), less), run("r3", noisy(1e-5, seed=9), more))
    k3, reward = found.sentences()
    assert "times smaller (95% interval over batches" in k3
    assert "a difference of +0.60" in reward
    assert reward.endswith("r3 earned more with this seed.")
    back = contrast(run("r3", noisy(1e-5, seed=9), more), run("off", noisy(3e-3), less))
    assert "times larger" in back.sentences()[0]
    assert back.sentences()[1].endswith("r3 earned more with this seed.")


def test_equal_rewards_show_no_difference():
    reward = np.random.default_rng(5).random(80).tolist()
    found = contrast(run("off", noisy(1e-3), reward), run("r3", noisy(1e-5), reward))
    assert found.sentences()[1].endswith("no difference seen.")


def test_two_gaps_that_are_too_small_have_no_ratio():
    found = contrast(run("off", noisy(5e-6), [0.5] * 80), run("r3", noisy(1e-7), [0.5] * 80))
    assert found.sentences()[0].endswith("both are too small to matter.")


def test_few_steps_have_no_interval():
    found = contrast(run("off", [1e-3] * 8, [0.5] * 8), run("r3", [1e-5] * 8, [0.75] * 8))
    assert math.isnan(found.k3_ratio.low)
    assert found.sentences()[0].endswith("100 times smaller; too few steps for an interval.")
    assert found.sentences()[1].endswith("too few steps to say more.")


def test_every_arm_is_compared_with_the_first_of_its_seed():
    flat = [1e-3] * 8, [0.5] * 8
    runs = [run(name, *flat, seed=seed) for seed in (3, 4) for name in ("off", "r3", "tis")]
    pairs = [(each.first, each.other, each.seed) for each in contrasts(runs)]
    assert pairs == [("off", "r3", 3), ("off", "tis", 3), ("off", "r3", 4), ("off", "tis", 4)]
    assert all(text.startswith("Seed ") for text in sentences_of(contrasts(runs)))


def test_no_k3_in_common_is_said_beside_the_reward():
    first, other = run("off", [1e-3] * 40, [0.5] * 40), run("r3", [None] * 40, [0.5] * 40)
    found = contrast(first, other)
    assert found.sentences()[0] == "No step has a k3 in both off and r3."
    assert found.sentences()[1].startswith("Reward, second half: 0.50 in off, 0.50 in r3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of numpy: mean of nothing
        assert rows_of_table([other])[0][3:5] == (DASH, DASH)


def test_steps_without_k3_are_counted():
    broken = [1e-3] * 30 + [None] * 10  # a run that breaks down
    found = contrast(run("off", broken, [0.5] * 40), run("r3", [1e-5] * 40, [0.5] * 40))
    assert found.sentences()[0].startswith("Over the 30 of 40 steps that have one in both, k3 is")


def test_arms_of_different_length_are_compared_over_the_shorter():
    long = run("off", [1e-3] * 60, [0.0] * 40 + [1.0] * 20)
    found = contrast(long, run("r3", [1e-5] * 40, [0.0] * 20 + [0.5] * 20))
    assert found.reward == (0.0, 0.5)
    assert found.sentences()[0] == (
        "off has 60 steps, r3 40: only the first 40 of both are compared."
    )


@pytest.mark.parametrize(
    ("first", "other", "end"),
    [
        ([0.0] * 40, [1e-3] * 40, "and 0.001 in r3."),
        ([1e-3] * 40, [0.0] * 40, "and 0 in r3."),
        # 0 in many a draw, so the ratio has no upper bound
        ([1e-3] * 40, [0.0] * 39 + [1e-3], "40 times smaller (95% interval over batches at least"),
        ([0.0] * 39 + [1e-3], [1e-3] * 40, "40 times larger (95% interval over batches at least"),
    ],
)
def test_a_k3_of_zero_has_no_ratio(first, other, end):
    found = contrast(run("off", first, [0.5] * 40), run("r3", other, [0.5] * 40))
    assert end in found.sentences()[0]


def test_a_ratio_that_may_be_one_is_no_difference():
    flat = [0.5] * 80
    found = contrast(run("off", noisy(1e-3), flat), run("r3", noisy(1e-3, seed=1), flat))
    assert "no difference seen (ratio " in found.sentences()[0]
    assert "times" not in found.sentences()[0]


def test_small_rewards_have_digits_and_no_negative_zero():
    less, more = [0.0] * 40 + [0.01, 0.013] * 20, [0.0] * 40 + [0.014, 0.017] * 20
    found = contrast(run("off", noisy(1e-3), less), run("r3", noisy(1e-5), more))
    assert "0.0115 in off, 0.0155 in r3, a difference of +0.0040 (" in found.sentences()[1]
    same = contrast(run("off", noisy(1e-3), less), run("r3", noisy(1e-5), less))
    assert "a difference of +0.00 (+0.00 to +0.00): no difference seen." in same.sentences()[1]


def test_table_has_first_and_last_tenths():
    row = rows_of_table([run("off", [1e-3] * 36 + [2e-3] * 4, [0.1] * 36 + [0.9] * 4)])[0]
    assert row[:3] == ("off, 0", "0.10 → 0.90", "0.25 → 0.50")
    assert row[4] == "0.002"


def test_table_of_a_run_without_evaluations_and_with_holes():
    rows = [{"step": at, "train/reward": None, "train/grad_norm": None} for at in (1, 2)]
    arm = ArmRun("off", 0, rows)
    assert rows_of_table([arm])[0] == ("off, 0", f"{DASH} → {DASH}", "", *[DASH] * 4)
    one = ArmRun("off", 0, [*rows, {"step": 3, "eval/greedy": 0.5}])
    assert rows_of_table([one])[0][2] == "0.50"


def test_page_and_tree(tmp_path):
    runs = [run("off", noisy(1e-3), [0.5] * 80), run("r3", [0.0] * 80, [0.5] * 80, norm=7.0)]
    write_comparison(tmp_path, "<b>title", runs, contrasts(runs), png=False)
    page = (tmp_path / "comparison.html").read_text()
    assert "&lt;b&gt;title" in page
    assert "k3 is 0.001" in page
    assert "trainer blue" not in page  # the colours are those of arms
    assert len(json.loads((tmp_path / "comparison.json").read_text())["sentences"]) == 2
    panels = picture(runs, "t").data
    assert [each["name"] for each in panels] == ["off"] * 3 + ["r3"] * 3
    assert min(panels[4]["y"]) > 0  # k3 of 0 on a log axis
    assert panels[5]["y"] == [7.0] * 80


def test_the_tree_is_json_where_there_is_no_interval(tmp_path):
    runs = [run("off", [1e-3] * 8, [0.5] * 8), run("r3", [0.0] * 8, [0.5] * 8)]
    write_comparison(tmp_path, "t", runs, contrasts(runs), png=False)
    text = (tmp_path / "comparison.json").read_text()
    tree = json.loads(text, parse_constant=pytest.fail)  # of NaN and Infinity
    assert tree["contrasts"][0]["k3_ratio"] == {"value": None, "low": None, "high": None}


def test_the_picture_does_not_take_the_place_of_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr("onepolicy.report.png._draw", lambda figures: None)
    runs = [run("off", noisy(1e-3), [0.5] * 80), run("r3", noisy(1e-5), [0.5] * 80)]
    write_comparison(tmp_path, "t", runs, contrasts(runs), png=True)
    assert "sentences" in json.loads((tmp_path / "comparison.json").read_text())
    drawn = json.loads((tmp_path / "curves.json").read_text())
    assert drawn["layout"]["height"] > 760  # three panels and the title


def test_six_arms_look_different():
    runs = [run(name, [1e-3] * 8, [0.5] * 8) for name in "abcdef"]
    lines = [each["line"] for each in picture(runs, "t").data]
    assert len({(line["color"], line["dash"]) for line in lines}) == 6
