"""`onepolicy measure --pressure`: the calibration of a study."""

import json

import pytest

from onepolicy.cli import main
from support.planted_engine import SETTINGS

PRESSED = ["--pressure", "1.0", "rollout.engine.dtype=float32", *SETTINGS]


@pytest.mark.full
def test_calibration(policy, tmp_path, capsys):
    out = tmp_path / "report"
    assert main(["measure", str(policy), *PRESSED, "--out", str(out)]) == 0
    tree = json.loads((out / "measure.json").read_text())
    plain, replayed = (tree["metrics"][name] for name in ("without_replay", "with_replay"))
    assert plain["mismatch/k3"] > 1e-4
    assert replayed["mismatch/k3"] < 1e-9
    assert plain["routing/routers"] > 0.2
    bars = {bar["name"]: bar["removed"]["value"] for bar in tree["waterfall"]["bars"]}
    assert bars["routing"] == max(bars.values())
    assert tree["verdict"]["action"] != "bug"
    text = " ".join(capsys.readouterr().out.split())
    line = "Not a real engine: the engine is under artificial routing pressure (scale 1, all"
    assert text.index(line) < text.index("Calibration: ") < text.index(tree["verdict"]["setting"])
    page = (out / "report.html").read_text()
    assert line in page
    assert "Calibration: " in page


@pytest.mark.full
def test_strong_pressure_is_no_bug(policy, capsys):
    """Its marks are those of several bugs, which the scoring with replay does not have."""
    command = ["measure", str(policy), *PRESSED, "rollout.pressure.scale=6"]
    assert main(command) == 0
    assert "A bug" not in capsys.readouterr().out


@pytest.mark.full
def test_it_goes_with_another_replay(policy, capsys):
    """A replay.mode in the command does not bring the guard back."""
    weights = ["rollout.pressure.weights=true", "replay.mode=weights"]
    weights += ["--pressure", "1.0", *SETTINGS]
    assert main(["measure", str(policy), *weights]) == 0
    assert "the choice of experts and their weights" in " ".join(capsys.readouterr().out.split())


def test_a_dense_model_has_nothing_to_press(policy, capsys):
    assert main(["measure", str(policy), *PRESSED, "--dense", "tiny"]) == 2
    assert "rollout.pressure: routing needs a Mixture-of-Experts model" in capsys.readouterr().err
