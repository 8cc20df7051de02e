"""Each gym recipe end to end through the command line: the reward rises, the greedy answers stay
right.

About 8 minutes of one idle core: three policies of 1.5 minutes and three runs of about 1. More
seeds: `python benchmarks/gym_curves.py`.
"""

import json
import sys

import pytest

from support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("gym_*.toml"))


@pytest.fixture(scope="module")
def gym_curves():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import gym_curves
    finally:
        sys.path.pop(0)
    return gym_curves


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


def test_there_are_three_data_sets():
    assert len(RECIPES) >= 3


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_reward_rises(recipe, seed, gym_curves, policies, tmp_path):
    policy = gym_curves.make_policy(recipe, policies, threads=1)  # kept from seed to seed
    run = tmp_path / "run"
    gym_curves.train(recipe, policy, run, seed, threads=1)
    summary = json.loads((run / "summary.json").read_text())
    assert (
        summary["reward_last"] > summary["reward_first"] + 0.2
    )  # 0.31 to 0.46 where it was written
    assert summary["eval_last"]["value"] > summary["eval_first"]["value"] - 0.1
    assert summary["crash_step"] is None
