"""benchmarks/program_curve.py plays what it says; in its three runs the reward rises."""

import program_curve
import pytest

pytest.importorskip("uvicorn", reason="make test-gateway installs it")

pytestmark = [pytest.mark.gateway, pytest.mark.process, pytest.mark.needs("bwrap")]
ONE_STEP = ("steps=1", "rollout.prompts_per_step=1", "rollout.group_size=2", "checkpoint.every=1")


def test_a_run_gives_a_reward_a_step(tmp_path):
    row = program_curve.play(5, tmp_path, ONE_STEP)
    assert row["seed"] == 5
    assert len(row["rewards"]) == 1
    assert row["rewards"][0] in (0, 0.5, 1)
    assert program_curve.play(5, tmp_path, ONE_STEP) == row  # kept, and not played again


def test_the_ends_of_a_row():
    row = {"seed": 1, "rewards": [0.0, 0.5, 0.5, 0.5, 1.0, 0.3, 0.6, 0.8, 0.8, 0.8, 1.0]}
    assert program_curve.ends_of(row) == pytest.approx((0.5, 0.8))


def test_the_reward_rises_with_every_seed():
    rows = program_curve.read_rows()
    assert [row["seed"] for row in rows] == list(program_curve.SEEDS)
    for row in rows:
        first, last = program_curve.ends_of(row)
        assert len(row["rewards"]) == 24
        assert last > first
