"""GRPOTrainer in two processes, DDP on gloo."""

from __future__ import annotations

import json

import pytest
import torch

from onepolicy.audit.run import audit
from support.scripts import run_script

pytestmark = [pytest.mark.trl, pytest.mark.process]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    run_script("trl/two_ranks.py", made, ranks=2)
    return made


def test_every_rank_replays_its_own_samples(folder):
    for row in json.loads((folder / "log.json").read_text()):
        assert row["mismatch/k3"] < row["mismatch_native/k3"]
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert 0.9 < row["routing/agreement"] < 1
        assert row["correction/weight_mean"] == pytest.approx(1, abs=0.05)


def test_ranks_stay_equal(folder):
    one, other = (torch.load(folder / f"parameters_{rank}.pt") for rank in range(2))
    assert torch.equal(one, other)


def test_every_rank_dumps_its_own_samples(folder):
    names = sorted(path.name for path in (folder / "dump").iterdir())
    assert names == [f"step_0000{step}_{rank}.parquet" for step in range(3) for rank in range(2)]
    found = audit(folder / "dump", {})
    assert found.verdict.action == "nothing"


def test_the_routes_of_a_servers_replies_reach_the_other_rank_once(folder):
    main, other = (json.loads((folder / f"shared_{rank}.json").read_text()) for rank in range(2))
    assert main == []
    assert other == [[[1, 2, 3], 2, "a"], [[1, 2, 3], 2, "b"]]
