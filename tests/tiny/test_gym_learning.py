"""Each gym recipe, end to end through the command line: make its policy, train one seed, see the reward rise."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("gym_*.toml"))
EDGE = 5  # steps at either end of the curve


@pytest.fixture(scope="module")
def gym_curves():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gym_curves
    finally:
        sys.path.pop(0)
    return gym_curves


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_reward_rises(recipe, gym_curves, tmp_path):
    policy = gym_curves.make_policy(recipe, tmp_path / "policies", threads=1)
    run = tmp_path / "run"
    gym_curves.train(recipe, policy, run, seed=0, threads=1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["train/reward"] for row in rows if "train/reward" in row]
    first, last = sum(rewards[:EDGE]) / EDGE, sum(rewards[-EDGE:]) / EDGE
    assert last > first + 0.06, rewards  # 0.14 where it was written
