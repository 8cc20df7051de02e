"""`onepolicy measure --quant`: the gap of a format before a run is named, and the correction of it
predicted."""

import json

import pytest

from onepolicy.cli import main
from onepolicy.config import resolve
from onepolicy.correct.predict import predict
from onepolicy.measure import attribution
from onepolicy.notation import number
from support.planted_engine import SETTINGS


@pytest.mark.full
def test_the_gap_is_named_and_the_correction_predicted(policy, tmp_path, capsys):
    out = tmp_path / "report"
    coarse = ["--quant", "simulated", "rollout.quant.bits=3", "rollout.engine.dtype=float32"]
    command = ["measure", str(policy), *SETTINGS, *coarse, "correction.preset=icepop"]
    assert main([*command, "--out", str(out)]) == 0
    tree = json.loads((out / "measure.json").read_text())
    bars = {bar["name"]: bar["removed"]["value"] for bar in tree["waterfall"]["bars"]}
    assert bars["quantisation"] == max(bars.values())
    fall = tree["waterfall"]
    assert fall["bars"][-1]["left"]["value"] < 0.05 * fall["total"]["value"]
    would = tree["prediction"]
    assert would["kl"] == pytest.approx(tree["metrics"]["with_replay"]["mismatch/k3"])
    whole = {"out": "x", "steps": 1, "model": {"path": "x"}, "task": {"kind": "chain"}}
    config = resolve(whole, ["correction.preset=icepop"])
    assert would["keep"] == predict(config.correction, would["kl"], would["length"]).keep
    printed = " ".join(capsys.readouterr().out.split())
    assert f"settings (icepop) would keep {number(would['keep'], share=True)}" in printed


@pytest.mark.full
def test_the_copy_that_stands_for_the_engine_has_its_static_scales(policy, monkeypatch):
    given, original = [], attribution.use_scales

    def use_scales(copy, scales):
        original(copy, scales)
        given.append((copy.quantised.scales(), scales))

    monkeypatch.setattr(attribution, "use_scales", use_scales)
    static = 'rollout.quant={format="int8", activations="static"}'
    few = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.engine.max_num_seqs=4"]
    assert main(["measure", str(policy), *SETTINGS, *few, static]) == 0
    ((copied, scales),) = given
    assert copied == scales != {}
