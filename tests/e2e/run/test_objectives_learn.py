"""GRPO, GSPO, REINFORCE++ and PPO with a critic each raise held-out accuracy, replay on, two
minibatches.

About 6 minutes of one idle core: one policy of 1.5 minutes and four runs of about 1. More seeds:
`python benchmarks/objective_curves.py`.
"""

import json

import gym_curves
import objective_curves
import pytest

from support.metrics import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return tmp_path_factory.mktemp("policies")


@pytest.mark.parametrize("name", objective_curves.OBJECTIVES)
def test_held_out_accuracy_rises(name, policies, tmp_path):
    policy = gym_curves.make_policy(objective_curves.RECIPE, policies, threads=1)
    run = tmp_path / "run"
    objective_curves.train_with(name, policy, run, 0, threads=1)
    scores = [row["eval/avg@4"] for row in rows(run) if "eval/avg@4" in row]
    assert scores[-1] > scores[0] + 0.1
    assert json.loads((run / "summary.json").read_text())["crash_step"] is None
