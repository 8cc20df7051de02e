"""What `onepolicy compare` says of arms: hand-made logs with known gaps."""

import json
import math
import warnings

import numpy as np
import pytest

from onepolicy.notation import DASH
from onepolicy.report.comparison import (
    figures,
    headline,
    rows_of_table,
    sentences_of,
    warnings_of,
    write_comparison,
)
from onepolicy.report.contrast import ArmRun, contrast, contrasts

LABELS = {"off": "without replay", "r3": "with replay"}


def run(name, k3, reward, seed=0, norm=1.0, labels=None):
    """Return a run whose step t has k3[t], reward[t] and one gradient norm."""
    rows = [
        {"step": at, "train/reward": r, "mismatch/k3": k, "train/grad_norm": norm}
        for at, (k, r) in enumerate(zip(k3, reward, strict=True), 1)
    ]
    ends = {"eval/avg@4": 0.25, "eval/greedy": 0.7}, {"eval/avg@4": 0.5, "eval/greedy": 0.6}
    rows = [{"step": 0, **ends[0]}, *rows, ends[1]]
    return ArmRun(name, seed, rows, (labels or {}).get(name, ""))


def both(first, other, *rewards):
    """Return the comparison of arms off and r3 with these k3, and rewards or 0.5 throughout."""
    rewards = rewards or ([0.5] * len(first), [0.5] * len(other))
    return contrast(run("off", first, rewards[0]), run("r3", other, rewards[1]))


def noisy(mean, steps=80, seed=0):
    return (mean * np.exp(0.3 * np.random.default_rng(seed).standard_normal(steps))).tolist()


def test_arms_that_learnt_nothing_say_so(tmp_path):
    """The page, its JSON and the terminal repeat the warning that the run gave."""
    told = "Nothing was learnt from rewards: no group had two different rewards in the only step."
    steps = [{"step": 1, "train/reward": 0.0, "mismatch/k3": 1e-3}]
    for name in ("off", "r3"):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(row) + "\n" for row in steps)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    found = {"learnt": "nothing", "verdict": told, "why": ["."], "silent": 1, "steps": 1}
    summary = {"steps": 1, "nothing_learnt": found}
    (tmp_path / "r3" / "summary.json").write_text(json.dumps(summary))
    runs = [ArmRun.read(name, 0, tmp_path / name) for name in ("off", "r3")]
    assert warnings_of(runs) == [f"r3, seed 0: {told}"]
    write_comparison(tmp_path, runs, contrasts(runs), recipe="x", png=False)
    assert json.loads((tmp_path / "comparison.json").read_text())["sentences"][0].endswith(told)
    assert told in (tmp_path / "comparison.html").read_text()
    (tmp_path / "off" / "summary.json").write_text(json.dumps(summary))
    runs = [ArmRun.read(name, 0, tmp_path / name) for name in ("off", "r3")]
    assert warnings_of(runs) == [f"Every run: {told}"]


def test_ratio_and_difference_of_means():
    rewards = [0.0] * 20 + [0.5] * 20, [1.0] * 20 + [0.25] * 20
    found = both([2e-3, 4e-3] * 20, [1e-5, 2e-5] * 20, *rewards)
    assert found.k3 == pytest.approx((3e-3, 1.5e-5))
    assert found.k3_ratio.value == pytest.approx(200)
    assert found.reward == (0.5, 0.25)  # of the second half
    assert found.reward_difference.value == -0.25


def test_the_interval_covers_the_ratio_and_narrows_with_steps():
    def width(steps):
        found = both(noisy(1e-3, steps, 1), noisy(1e-5, steps, 2)).k3_ratio
        assert found.low < found.value < found.high
        return math.log(found.high / found.low)

    assert width(1600) < width(100) / 2


def test_blocks_widen_the_interval_of_a_slow_curve():
    """Steps one after the other are alike, and an interval over single steps would not know."""
    slow = (1e-3 * np.exp(np.repeat(np.random.default_rng(3).standard_normal(8), 20))).tolist()
    shuffled = np.random.default_rng(4).permutation(slow).tolist()

    def width(values):
        found = both(values, [1e-5] * 160).k3_ratio
        return math.log(found.high / found.low)

    assert width(slow) > 1.5 * width(shuffled)


def test_sentences():
    more = [0.2] * 40 + [0.9, 0.8] * 20
    less = [0.2] * 40 + [0.3, 0.2] * 20
    k3, reward = sentences_of([both(noisy(3e-3), noisy(1e-5, seed=9), less, more)])
    assert "times smaller (95% interval over batches" in k3
    assert "a difference of +0.60" in reward
    assert reward.endswith("): more in r3 with this seed.")
    back = contrast(run("r3", noisy(1e-5, seed=9), more), run("off", noisy(3e-3), less))
    assert "times larger" in sentences_of([back])[0]
    assert sentences_of([back])[1].endswith("): more in r3 with this seed.")


MISSING = [1e-3] * 30 + [None] * 10  # a run that breaks down
LATE = [0.0] * 39 + [1e-3]  # 0 in many a draw, so the ratio has no upper bound
K3_SENTENCES = [
    (noisy(5e-6), noisy(1e-7), "both are too small to matter."),
    ([1e-3] * 8, [1e-5] * 8, "100 times smaller; too few steps for an interval. The median"),
    (MISSING, [1e-5] * 40, "Over the 30 of 40 steps that have one in both, mean k3 is"),
    ([1e-3] * 40, [None] * 40, "No step has a k3 in both arms, off and r3."),
    ([0.0] * 40, [1e-3] * 40, "and 1e-3 in r3. The median step"),  # a k3 of 0 has no ratio
    ([1e-3] * 40, [0.0] * 40, "and 0 in r3. The median step"),
    ([1e-3] * 40, LATE, "40 times smaller (95% interval over batches at least"),
    (LATE, [1e-3] * 40, "40 times larger (95% interval over batches at least"),
    (noisy(1e-3), noisy(1e-3, seed=1), ": no difference seen (ratio "),  # that may be 1
]
LOW, HIGH = [0.0] * 40 + [0.01, 0.013] * 20, [0.0] * 40 + [0.014, 0.017] * 20
RANDOM = np.random.default_rng(5).random(80).tolist()
REWARD_SENTENCES = [
    (RANDOM, RANDOM, "): no difference seen."),
    ([0.5] * 8, [0.75] * 8, "a difference of +0.25; too few steps to say more."),
    (LOW, HIGH, "0.0115 in off, 0.0155 in r3, a difference of +0.0040 ("),
    (LOW, LOW, "a difference of +0.00 (+0.00 to +0.00): no difference seen."),  # no -0
]


def test_sentences_of_each_case(subtests):
    for first, other, words in K3_SENTENCES:
        with subtests.test(words):
            assert words in sentences_of([both(first, other)])[0]
    for first, other, words in REWARD_SENTENCES:
        with subtests.test(words):
            k3 = [1e-3] * len(first)
            assert words in sentences_of([both(k3, k3, first, other)])[1]


def test_every_arm_is_compared_with_the_first_of_its_seed():
    flat = [1e-3] * 8, [0.5] * 8
    runs = [run(name, *flat, seed=seed) for seed in (3, 4) for name in ("off", "r3", "tis")]
    pairs = [(each.first, each.other, each.seed) for each in contrasts(runs)]
    assert pairs == [("off", "r3", 3), ("off", "tis", 3), ("off", "r3", 4), ("off", "tis", 4)]
    assert all(text.startswith("Seed ") for text in sentences_of(contrasts(runs)))


def test_no_k3_in_common_is_said_beside_the_reward():
    found = sentences_of([both([1e-3] * 40, [None] * 40)])
    assert found[1].startswith("Reward, second half: 0.50 in off, 0.50 in r3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of numpy: mean of nothing
        row = rows_of_table([run("r3", [None] * 40, [0.5] * 40)])[0]
    assert row[4:7] == (DASH, DASH, DASH)


def test_arms_of_different_length_are_compared_over_the_shorter():
    rewards = [0.0] * 40 + [1.0] * 20, [0.0] * 20 + [0.5] * 20
    found = both([1e-3] * 60, [1e-5] * 40, *rewards)
    assert found.reward == (0.0, 0.5)
    words = "off has 60 steps, r3 40: only the 40 of both are compared, off lacks 0 and r3 20."
    assert sentences_of([found])[0] == words


def test_steps_are_paired_by_their_number(tmp_path):
    """A log lacks steps 2 and 3, the other step 8."""
    off, r3 = arms([1e-3, 9.0, 9.0, *[1e-3] * 5], [1e-5] * 7 + [9.0])
    off.rows[:] = [row for row in off.rows if row.get("step") not in (2, 3)]
    r3.rows[:] = [row for row in r3.rows if row.get("step") != 8]
    off.rows[-2]["mismatch/k3"] = 9.0  # of step 8
    found = contrast(off, r3)
    assert (found.lengths, found.steps) == ((6, 7), 5)
    assert found.k3 == pytest.approx((1e-3, 1e-5))
    words = "off has 6 steps, r3 7: only the 5 of both are compared, off lacks 2 and r3 1."
    assert sentences_of([found])[0] == words
    assert headline([off, r3]) == "k3 is at most 1e-3 in every step of every arm"
    dots = figures([off, r3])[0].data[0]
    assert list(dots["x"]) == [1, 4, 5, 6, 7, 8]


def test_the_headline_counts_the_steps_of_all_arms():
    """A run that stopped, and one whose k3 was infinite, which is null in its log."""
    short = arms([2e-3] * 3 + [1e-5] * 37 + [2e-3] * 360, [1e-5] * 40)
    assert headline(short) == "Replay: 3 of 40 steps above 1e-3 without, 0 with"
    infinite = arms([2e-3] * 3 + [None] * 2 + [1e-5] * 35, [1e-5] * 39 + [None])
    assert headline(infinite) == (
        "Replay: 3 of 40 steps above 1e-3 without, 0 with; without a finite k3: 2 steps without "
        "replay, 1 step with replay"
    )
    assert headline(arms([2e-4] * 8, [1e-5] * 7 + [None])) == (
        "k3 is at most 1e-3 in every other step of every arm; without a finite k3: 1 step with "
        "replay"
    )


def test_table_has_first_and_last_tenths_and_leaves_holes_empty():
    row = rows_of_table([run("off", [1e-3] * 36 + [2e-3] * 4, [0.1] * 36 + [0.9] * 4)])[0]
    assert row[:4] == ("off, 0", "0.10→0.90", "0.25→0.50", "0.70→0.60")
    assert row[4:] == ("1.1e-3", "1e-3", "4 of 40", "1")
    rows = [{"step": at, "train/reward": None, "train/grad_norm": None} for at in (1, 2)]
    arm = ArmRun("off", 0, rows)
    assert rows_of_table([arm])[0] == ("off, 0", f"{DASH}→{DASH}", "", "", *[DASH] * 4)
    one = ArmRun("off", 0, [*rows, {"step": 3, "eval/greedy": 0.5}])
    assert rows_of_table([one])[0][2:4] == ("", "0.50")


def arms(first, other, labels=LABELS, **values):
    """Return the runs off and r3 with these k3 and a reward of 0.5 throughout."""
    given = zip(("off", "r3"), (first, other), strict=True)
    return [run(name, k3, [0.5] * len(k3), labels=labels, **values) for name, k3 in given]


def test_arms_that_differ_in_replay_alone_are_called_by_it():
    two = arms([2e-3] * 30 + [1e-5] * 50, [1e-5] * 80)
    assert headline(two) == "Replay: 30 of 80 steps above 1e-3 without, 0 with"
    unlike, unknown = ([2e-3] * 8, [1e-5] * 8), ([None] * 8, [1e-5] * 8)
    assert headline(arms(*unlike, {})) == "k3: 8 of 8 steps above 1e-3 in off, 0 in r3"
    every = "in every step of every arm"
    assert headline(arms([2e-4] * 8, [1e-5] * 8)) == f"k3 is at most 1e-3 {every}"
    assert headline(arms([1e-5] * 8, [9e-5] * 8)) == (
        f"k3 is at most 1e-4 {every}, too small to matter"
    )
    assert headline(arms(*unknown)) == "Arms compared: off, r3"
    more = [*two, *(run(each.name, [2e-3], [0.5], 1, labels=LABELS) for each in two)]
    assert headline(more) == "Replay: 31 of 81 steps above 1e-3 without, 1 with"  # of both seeds
    mean, reward = sentences_of([contrasts(two)[0]])
    assert mean.startswith("Mean k3 is 7.56e-4 without replay and 1e-5 with replay: 75.6 times")
    assert mean.endswith("The median step has 1e-5 and 1e-5; 30 and 0 of 80 steps are above 1e-3.")
    assert reward.startswith("Reward, second half: 0.50 without replay, 0.50 with replay")


def test_page_and_tree(tmp_path):
    runs = arms(noisy(1e-3), [0.0] * 80, norm=7.0)
    write_comparison(tmp_path, runs, contrasts(runs), recipe="<b>title", png=False)
    page = (tmp_path / "comparison.html").read_text()
    assert "&lt;b&gt;title" in page
    assert " without replay and 0 with replay" in page
    assert "trainer blue" not in page  # the colours are those of arms
    assert len(json.loads((tmp_path / "comparison.json").read_text())["sentences"]) == 2


def test_the_tree_is_json_where_there_is_no_interval(tmp_path):
    runs = arms([1e-3] * 8, [0.0] * 8)
    write_comparison(tmp_path, runs, contrasts(runs), recipe="t", png=False)
    text = (tmp_path / "comparison.json").read_text()
    tree = json.loads(text, parse_constant=pytest.fail)  # of NaN and Infinity
    assert tree["contrasts"][0]["k3_ratio"] == {"value": None, "low": None, "high": None}


def test_the_picture_does_not_take_the_place_of_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr("onepolicy.report.png._draw", lambda figures: None)
    runs = arms(noisy(1e-3), noisy(1e-5))
    write_comparison(tmp_path, runs, contrasts(runs), recipe="t", png=True)
    assert "sentences" in json.loads((tmp_path / "comparison.json").read_text())
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"k3", "reward", "grad_norm"}
