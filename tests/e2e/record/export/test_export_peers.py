"""Exporters on the peers' own objects: TRL trains live and verl's data container is filled."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from onepolicy.audit.run import audit
from support.oracle.venv import PYTHON, SCRIPTS
from support.paths import ROOT

pytestmark = [pytest.mark.oracle, pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PYTHON.exists(), "the oracle venv is missing; `make test-oracle` builds it"
    folder = tmp_path_factory.mktemp("export")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [str(PYTHON), str(SCRIPTS / "export_peers.py"), str(folder)]
    environment = os.environ | {"PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def said(exported: Path) -> dict[str, Any]:
    return json.loads((exported / "peers.json").read_text())


def test_trl_live_is_judged_clean(exported, said) -> None:
    found = audit(exported / "trl-1", {})
    assert found.verdict.action == "nothing"
    assert "entropy" in found.accumulated.columns
    steps = {step: stats.statistics() for step, stats in found.accumulated.steps.items()}
    assert len(said["trl"]) == len(steps) == 3
    for row in said["trl"]:
        ours = steps[row["step"] - 1]
        assert ours["tokens"] == 8 * 24 - 1  # one came without a log-probability
        for each in ("mean", "max"):
            theirs = row[f"sampling/sampling_logp_difference/{each}"]
            assert ours[f"{each}_dlogp"] == pytest.approx(theirs, rel=1e-4)
        theirs = row["sampling/importance_sampling_ratio/mean"]  # which counts it as 1
        assert (191 * ours["mean_rho"] + 1) / 192 == pytest.approx(theirs, rel=1e-5)
        reward = found.accumulated.rewards[row["step"] - 1].mean
        assert reward == pytest.approx(row["reward"], rel=1e-5)


def test_an_unreported_temperature_of_a_live_trl_run_is_named(exported) -> None:
    found = audit(exported / "trl-1.4", {})
    assert (found.verdict.action, found.verdict.causes) == ("bug", ("temperature",))
    assert "about 1.4" in found.verdict.basis[0]


def test_verl_container_and_its_metrics(exported, said) -> None:
    found = audit(exported / "verl", {})
    assert set(found.accumulated.columns) >= {"entropy", "version", "reward", "step"}
    assert found.accumulated.newest == {0: 0, 1: 1}
    rewards = found.accumulated.rewards
    assert {step: (each.mean, each.tokens) for step, each in rewards.items()} == {
        0: (1.0, 4),
        1: (1.0, 4),
    }
    theirs, ours = said["verl"], found.accumulated.steps[0].statistics()
    assert ours["tokens"] == 12 + 5 + 9 + 12 - 4  # without the tool's token of each row
    names = {
        "k3": "rollout_corr/k3_kl 100",
        "k1": "rollout_corr/kl 100",
        "chi2": "rollout_corr/chi2_token 100",
        "ess": "rollout_corr/rollout_is_eff_sample_size 100",
        "mean_rho": "rollout_corr/rollout_is_mean 100",
        "ppl_ratio": "rollout_corr/ppl_ratio 100",
        "mean_dp": "training/rollout_probs_diff_mean",
        "max_dp": "training/rollout_probs_diff_max",
        "pearson": "training/rollout_actor_probs_pearson_corr",
    }
    for name, key in names.items():
        assert ours[name] == pytest.approx(theirs[key], rel=1e-4), name


def test_verl_measures_ess_behind_its_truncation(exported, said) -> None:
    """verl's effective sample size is that of the clamped weights: a lower threshold makes it look
    better. Ours is that of the ratio, whatever the correction does."""
    found = audit(exported / "verl", {}).accumulated.steps[0].statistics()
    assert said["verl"]["rollout_corr/rollout_is_eff_sample_size 1.2"] > found["ess"] + 0.05
