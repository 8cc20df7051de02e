"""The recipe agent_reinforce learns with TIS and without, and every part of it acts."""

import pytest

from onepolicy.cli import main
from support.metrics import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
RUN = ["steps=12", "eval.every=12", "log.report=false", "log.tensorboard=false"]


@pytest.mark.parametrize("correction", ["tis", "recompute"])
def test_it_learns_and_every_part_acts(correction, sums_policy, tmp_path):
    run = tmp_path / "run"
    settings = [f"model.path={sums_policy}", f"out={run}", f"correction.preset={correction}", *RUN]
    assert main(["train", "recipes/agent_reinforce.toml", *settings]) == 0
    first, last = (row["eval/avg@2"] for row in rows(run) if "eval/avg@2" in row)
    steps = [row for row in rows(run) if "train/reward" in row]
    assert last > first + 0.1
    # later updates of a batch do reach the clip range
    assert any(row["train/clip_low"] > 0 for row in steps)
    assert any(row["rollout/refills"] > 0 for row in steps)
    assert all(row["train/groups_without_signal"] == 0 for row in steps)
    for row in steps:
        assert (row["correction/weighted"] > 0.5) == (correction == "tis")
