"""OpenRLHF 0.11.2's own experience maker, policy loss and actor, under our setup.

They run in the oracle venv (tests/support/oracle/openrlhf_run.py), without Ray's processes,
DeepSpeed and vLLM.
"""

from __future__ import annotations

import json
import subprocess

import pytest

from support import contracts
from support.oracle.venv import PYTHON, SCRIPTS
from support.paths import ROOT

pytestmark = [pytest.mark.oracle, pytest.mark.process]
capability = pytest.mark.capability


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("needs .venv-oracle, which `make test-oracle` builds")
    out = tmp_path_factory.mktemp("openrlhf") / "found.json"
    command = [PYTHON, SCRIPTS / "openrlhf_run.py", out]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)
    return json.loads(out.read_text())


@capability("OpenRLHF", "measured", how="live")
@capability("OpenRLHF", "dump", how="live")
def test_a_step_is_measured_and_dumped(found):
    step = found["step"]
    assert step["k3"] == pytest.approx(step["k3 expected"], rel=1e-6)
    assert step["k3 of the dump"] == [pytest.approx(step["k3 expected"], rel=1e-4)]
    assert {"mismatch/k3", "correction/rejected"} <= set(step["reported"])


@capability("OpenRLHF", "fixed corrections", how="live")
def test_tis_is_openrlhfs_own(found):
    assert found["step"]["tis error"] < 1e-6
    assert found["tis against OpenRLHF's"] < 1e-7


@capability("OpenRLHF", "live corrections", how="live")
def test_live_corrections_by_hand(found):
    assert set(found["live"]) == {"pg-tis", "ppo-is"}
    assert max(found["live"].values()) < 1e-7


def test_a_live_correction_is_logged(found):
    log = found["live log"]
    names = ["correction/ratio_mean", "correction/rejected", "correction/weight_mean"]
    assert log["names"] == names
    assert log["weighed by"] == ["token"]
    assert log["weight_mean"] == pytest.approx(log["by hand"], rel=1e-5)


def test_a_resumed_run_goes_on_counting_and_replaces_no_dump(found):
    names = ("00041_0.parquet", "00042_0.parquet", "00042_0.parquet.1", "00043_0.parquet")
    assert found["resumed"] == [f"step_{name}" for name in names]


@capability("OpenRLHF", "preflight", how="live")
def test_settings_that_do_not_fit_are_named(found):
    assert "is_correction_level token" in found["refused"]["no log-probabilities"]
    assert "score centering" in found["refused"]["score-centering"]
    assert "use ppo" in found["refused"]["pg-tis in gspo"]


def test_the_actor_takes_routes(found):
    """The layout is read from the actor's own forward; the routes have to be handed in."""
    assert found["replay"]["own routes"]
    assert found["replay"]["changed"] > 1e-4
    assert "row" in found["replay"]["late"]


def test_the_installed_package_has_the_signatures_of_the_page():
    site = next((PYTHON.parents[1] / "lib").glob("python3*")) / "site-packages"
    assert contracts.compare("OpenRLHF", site) == []
