"""What `onepolicy compare` says of arms: hand-made logs with known gaps."""

import json
import math

import numpy as np
import pytest

from onepolicy.config import UsageError
from onepolicy.report.comparison import (
    ArmRun,
    contrast,
    contrasts,
    picture,
    rows_of_table,
    sentences_of,
    write_comparison,
)


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
    assert found.sentences()[0].endswith("100 times smaller.")
    assert found.sentences()[1].endswith("too few steps to say more.")


def test_every_arm_is_compared_with_the_first_of_its_seed():
    flat = [1e-3] * 8, [0.5] * 8
    runs = [run(name, *flat, seed=seed) for seed in (3, 4) for name in ("off", "r3", "tis")]
    pairs = [(each.first, each.other, each.seed) for each in contrasts(runs)]
    assert pairs == [("off", "r3", 3), ("off", "tis", 3), ("off", "r3", 4), ("off", "tis", 4)]
    assert all(text.startswith("Seed ") for text in sentences_of(contrasts(runs)))


def test_no_k3_in_common_is_named():
    first, other = run("off", [1e-3] * 8, [0.5] * 8), run("r3", [None] * 8, [0.5] * 8)
    with pytest.raises(UsageError, match="mismatch/k3: no step has it in both off and r3"):
        contrast(first, other)


def test_table_has_first_and_last_tenths():
    row = rows_of_table([run("off", [1e-3] * 36 + [2e-3] * 4, [0.1] * 36 + [0.9] * 4)])[0]
    assert row[:3] == ("off, 0", "0.10 → 0.90", "0.25 → 0.50")
    assert row[4] == "0.002"


def test_page_and_tree(tmp_path):
    runs = [run("off", noisy(1e-3), [0.5] * 80), run("r3", [0.0] * 80, [0.5] * 80, norm=7.0)]
    write_comparison(tmp_path, "<b>title", runs, png=False)
    page = (tmp_path / "comparison.html").read_text()
    assert "&lt;b&gt;title" in page
    assert "k3 is 0.001" in page
    assert len(json.loads((tmp_path / "comparison.json").read_text())["sentences"]) == 2
    panels = picture(runs, "t").data
    assert [each["name"] for each in panels] == ["off"] * 3 + ["r3"] * 3
    assert min(panels[4]["y"]) > 0  # k3 of 0 on a log axis
    assert panels[5]["y"] == [7.0] * 80
