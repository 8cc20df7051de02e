"""GRPOTrainer with the CPU build of vLLM 0.30.0 in its process, live."""

from __future__ import annotations

import json

import pytest

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
