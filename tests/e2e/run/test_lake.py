"""GRPO + R3 on gymnasium's FrozenLake from the recipe, end to end through the command line: the
reward rises."""

import json

import pytest

from onepolicy.cli import main
from support.metrics import rows
from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_reward_rises_on_a_lake(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from gym_curves import policy_command

    recipe = ROOT / "recipes" / "agent_lake.toml"
    command = policy_command(recipe)
    command[command.index("--out") + 1] = str(tmp_path / "policy")
    assert main(command) == 0
    run, policy = tmp_path / "run", f"model.path={tmp_path / 'policy'}"
    assert main(["train", str(recipe), policy, f"out={run}", "log.report=false"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.2  # 0.45 to 0.49 higher
    scores = [row["eval/avg@4"] for row in rows(run) if "eval/avg@4" in row]
    assert scores[-1] > scores[0] + 0.2  # 0.39 to 0.91
