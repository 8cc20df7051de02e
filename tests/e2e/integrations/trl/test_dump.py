"""The dump of a TRL run, audited with the routes of both sides."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

import onepolicy.integrations.trl as op_trl
from onepolicy.audit.run import audit
from support.trl.tiny import CopySampler, make_trainer, train

capability = pytest.mark.capability
pytestmark = pytest.mark.trl


def dumped(folder, *, change=None, **settings):
    trainer = make_trainer(folder / "out", sampler=CopySampler(change=change))
    op_trl.attach(trainer, dump=folder / "dump", **settings)
    return train(trainer), audit(folder / "dump", {})


@capability("TRL", "dump", how="live")
def test_audit_sees_replay_and_routes(tmp_path):
    log, found = dumped(tmp_path, native_every=1)
    assert found.verdict.action == "nothing"
    steps = {step: stats.statistics() for step, stats in found.accumulated.steps.items()}
    assert sorted(steps) == [0, 1, 2]
    for row in log:
        assert steps[row["step"] - 1]["k3"] == pytest.approx(row["mismatch/k3"], rel=1e-3)
    files = sorted((tmp_path / "dump").iterdir())
    assert [path.name for path in files] == [f"step_0000{step}_0.parquet" for step in range(3)]
    rows = pq.read_table(files[0]).to_pylist()
    assert len(rows) == 8
    for row in rows:
        size = len(row["tokens"]) * row["route_layers"] * row["route_top_k"]
        assert len(row["routes_rollout"]) == len(row["routes_trainer"]) == size
        assert min(row["routes_rollout"]) >= 0
        assert len(row["logp_native"]) == len(row["entropy"]) == len(row["tokens"])
    assert any(row["logp_native"] != row["logp_trainer"] for row in rows)
    assert any(row["routes_rollout"] != row["routes_trainer"] for row in rows)


def test_without_replay_audit_sees_the_gap(tmp_path):
    log, found = dumped(tmp_path, replay="off")
    steps = {step: stats.statistics() for step, stats in found.accumulated.steps.items()}
    for row in log:
        assert steps[row["step"] - 1]["k3"] == pytest.approx(row["mismatch/k3"], rel=1e-3)
        assert row["mismatch/k3"] > 1e-5


def test_audit_names_routes_of_other_rows(tmp_path):
    _, found = dumped(tmp_path, change=lambda ids: np.concatenate([ids[:1], ids[:-1]]), check=False)
    assert (found.verdict.action, found.verdict.causes) == ("bug", ("routes",))
    assert "late" in " ".join(found.verdict.basis)


def test_generations_of_one_optimiser_step_share_a_file(tmp_path):
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(
        tmp_path, sampler=CopySampler(), steps_per_generation=1, max_steps=1, **parts
    )
    op_trl.attach(trainer, dump=tmp_path / "dump")
    train(trainer)
    (path,) = (tmp_path / "dump").iterdir()
    assert pq.read_table(path).num_rows == 8
