"""Best step and the written crash rule."""

import json
from io import StringIO

import pytest
from rich.console import Console

from onepolicy.config import resolve
from onepolicy.report.terminal import summary_parts
from onepolicy.run.summary import crash_step, summarise

SECTIONS = {"out": "x", "steps": 4, "model": {"path": "m"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize(
    ("scores", "crash"),
    [
        ([], None),
        ([0.5, 0.8, 0.9], None),
        ([0.5, 0.9, 0.7, 0.66], None),  # never 0.25 below 0.9
        ([0.5, 0.9, 0.6, 0.3], 2),  # falls at index 2 and stays
        ([0.5, 0.9, 0.6, 0.7], None),  # came back above 0.65
        ([0.5, 0.9, 0.3, 0.7, 0.2, 0.1], 4),  # recovered once, then for good
        ([0.9, 0.65], 1),  # exactly 0.25 counts
    ],
)
def test_crash_rule(scores, crash):
    assert crash_step(list(enumerate(scores))) == crash


def test_a_null_reward_of_a_damaged_file_is_left_out(tmp_path):
    config = resolve(SECTIONS)
    rows = [{"step": n, "train/reward": n % 2 / 1} for n in range(1, 6)]
    rows[2]["train/reward"] = None
    summary = summarise(config, rows, tmp_path, None)
    # 1, 0, 0, 1: squares of differences 1, 0, 1, of which noise is half the mean
    assert summary["reward_error"] == pytest.approx((2 / 3 / summary["reward_window"]) ** 0.5)


def test_summary_by_hand(tmp_path):
    config = resolve(SECTIONS | {"eval": {"every": 2, "greedy": True}})
    rows = [{"step": 0, "eval/greedy": 0.25}]
    for step, reward in enumerate([0.0, 0.5, 0.5, 1.0], start=1):
        row = {"step": step, "train/reward": reward, "mismatch/k3": step * 1e-3, "time/step": 2.0}
        row["train/tokens_per_second"] = 100.0
        rows.append(row | {2: {"eval/greedy": 0.75}, 4: {"eval/greedy": 0.5}}.get(step, {}))
    rows[1] |= {"counterfactual/mismatch/k3": 5e-3, "time/counterfactual": 2.0}
    summary = summarise(config, rows, tmp_path, None)
    assert summary["reward_window"] == 2
    assert (summary["reward_first"], summary["reward_last"]) == (0.25, 0.75)
    # steps of 0.5, 0 and 0.5: noise 0.5 / 6, of a difference of means of two
    assert summary["reward_error"] == pytest.approx((0.5 / 6) ** 0.5)
    assert summarise(config, rows[:4], tmp_path, None)["reward_error"] is None
    assert summary["eval_best"] == {"step": 2, "value": 0.75}
    assert summary["crash_step"] == 4
    assert summary["mismatch"]["mismatch/k3"] == pytest.approx(2.5e-3)
    assert summary["mismatch_at_probes"]["mismatch/k3"] == pytest.approx(1e-3)
    assert summary["mismatch_without_replay"]["mismatch/k3"] == pytest.approx(5e-3)
    assert summary["k3_cuts"] == [pytest.approx(5.0)]
    assert summary["time"]["step"] == 2.0
    assert summary["time"]["counterfactual"] == 0.5  # one probe in four steps
    slow = {"time/step": 6.0, "train/tokens_per_second": 20.0}
    summary = summarise(config, [rows[1], rows[2] | slow], tmp_path, None)
    assert summary["tokens_per_second"] == pytest.approx((200 + 120) / 8)  # no mean of rates


def rows_with(name, *values):
    return [{"step": at, "train/reward": 0.5, name: n} for at, n in enumerate(values, start=1)]


def test_groups_without_signal_at_the_end(tmp_path):
    rows = rows_with("train/groups_without_signal", 0, 0, 0.75, 0.25)
    assert summarise(resolve(SECTIONS), rows, tmp_path, None)["groups_without_signal"] == 0.5
    critic = resolve(SECTIONS | {"objective": {"preset": "ppo"}})  # compares all groups' answers
    assert "groups_without_signal" not in summarise(critic, rows, tmp_path, None)


def test_skipped_updates_are_reported_at_the_end(tmp_path):
    config = resolve(SECTIONS | {"steps": 3})

    def told(*skipped):
        rows = rows_with("train/updates_skipped", *skipped)
        console = Console(file=StringIO(), width=100)
        for part in summary_parts(summarise(config, rows, tmp_path, None)):
            console.print(part)
        return console.file.getvalue()

    assert "Updates skipped" not in told(0.0, 0.0, 0.0)
    assert "Updates skipped: 3, their gradients were not finite" in told(2.0, 0.0, 1.0)


def test_episodes_that_tools_ended_are_not_among_those_without_a_support(tmp_path):
    drop = {"sampling": {"top_p": 0.9, "missing_support": "drop"}}
    config = resolve(SECTIONS | {"rollout": drop})
    rows = rows_with("rollout/episodes_dropped", 3, 1, 0, 2)
    for row, missing, dropped in zip(rows, (2, 0, 1, 1), (1, 0, 0, 1), strict=True):
        row |= {"rollout/missing_supports": missing, "rollout/dropped_without_support": dropped}
    found = summarise(config, rows, tmp_path, None)["missing_supports"]
    assert found == {"attempts": 4, "dropped": 2}


def test_numbers_that_no_float_can_hold_are_none(tmp_path):
    """JSON has no infinity: a damaged row of 1e308 must not leave one in summary.json."""
    rows = [{"step": step, "train/reward": 1.7e308, "mismatch/k3": 5e-324} for step in range(1, 5)]
    rows[0] |= {"counterfactual/mismatch/k3": 1e300}
    found = summarise(resolve(SECTIONS), rows, tmp_path, None)
    json.dumps(found, allow_nan=False)
    assert found["reward_first"] is None
    assert found["k3_cuts"] == []
