"""Each gym recipe end to end through the command line: the reward rises, the greedy answers stay
right.

About 8 minutes of one idle core: three policies of 1.5 minutes and three runs of about 1. More
seeds: `python benchmarks/gym_curves.py`.
"""

import json

import gym_curves
import pytest

from support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("gym_*.toml"))
assert len(RECIPES) >= 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_reward_rises(recipe, tmp_path):
    policy = gym_curves.make_policy(recipe, tmp_path, threads=1)
    run = tmp_path / "run"
    gym_curves.train(recipe, policy, run, 0, threads=1)
    summary = json.loads((run / "summary.json").read_text())
    # 0.31 to 0.46 where it was written
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert summary["eval_last"]["value"] > summary["eval_first"]["value"] - 0.1
    assert summary["crash_step"] is None
