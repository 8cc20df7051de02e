"""GRPOTrainer with the CPU build of vLLM 0.30.0 in its process, live."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from onepolicy.audit.run import audit
from support.scripts import run_script

pytestmark = [pytest.mark.trl, pytest.mark.process]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("colocate")
    run_script("trl/colocate.py", folder)
    return json.loads((folder / "log.json").read_text())


def test_every_row_is_routed_and_k3_falls(log):
    assert len(log) == 3
    for row in log:
        assert row["replay/missing_samples"] == row["replay/native_rows"] == 0
        assert row["mismatch/k3"] < row["mismatch_native/k3"]
        assert 0.9 < row["routing/agreement"] < 1


def test_trls_log_probabilities_are_those_that_were_measured(log):
    for row in log:
        assert row["mismatch/mean_dlogp"] == pytest.approx(
            row["sampling/sampling_logp_difference/mean"], rel=1e-3
        )


def test_top_p_is_scored_over_what_vllm_kept(tmp_path):
    """Ratios are those of uncut sampling: 1 but for rounding. Routes are replayed beside them."""
    pytest.importorskip("vllm")
    run_script("trl/colocate.py", tmp_path, "cut")
    log = json.loads((tmp_path / "log.json").read_text())
    assert len(log) == 3
    for row in log:
        assert row["replay/missing_samples"] == 0
        assert row["mismatch/k3"] < 1e-3
        assert abs(row["correction/ratio_mean"] - 1) < 0.01
    found = audit(tmp_path / "dump", {})
    assert found.verdict.action == "nothing", found.verdict.text()
    rows = pq.read_table(sorted((tmp_path / "dump").iterdir())[0]).to_pylist()
    sizes = [count for row in rows for count in row["support_counts"]]
    assert 1 <= min(sizes) < max(sizes) <= 20
