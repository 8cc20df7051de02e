"""`onepolicy measure --quant`: the gap of a format before a run is named, and the correction of it
predicted."""

import json

import pytest

from onepolicy.cli import main
from onepolicy.config import resolve
from onepolicy.correct.predict import predict
from support.planted_engine import SETTINGS


def test_the_gap_is_named_and_the_correction_predicted(policy, tmp_path, capsys):
    out = tmp_path / "report"
    coarse = ["--quant", "simulated", "rollout.quant.bits=3", "rollout.engine.dtype=float32"]
    assert (
        main(
            [
                "measure",
                str(policy),
                *SETTINGS,
                *coarse,
                "correction.preset=icepop",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    tree = json.loads((out / "measure.json").read_text())
    bars = {bar["name"]: bar["removed"]["value"] for bar in tree["waterfall"]["bars"]}
    assert bars["quantisation"] == max(bars.values())
    assert (
        tree["waterfall"]["bars"][-1]["left"]["value"] < 0.05 * tree["waterfall"]["total"]["value"]
    )
    would = tree["prediction"]
    assert would["kl"] == pytest.approx(tree["metrics"]["with_replay"]["mismatch/k3"])
    config = resolve(
        {
            "out": "x",
            "steps": 1,
            "model": {"path": "x"},
            "task": {"kind": "chain"},
            "correction": {"preset": "icepop"},
        }
    )
    assert would["keep"] == predict(config.correction, would["kl"], would["length"]).keep
    assert f"Correction icepop would keep {would['keep']:.2%}" in " ".join(
        capsys.readouterr().out.split()
    )
