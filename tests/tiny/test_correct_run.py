"""Corrections inside a run: every preset trains or is refused with its reason; the receipt reaches metrics.jsonl."""

from __future__ import annotations

import pytest
from conftest import rows

from onepolicy.cli import main
from onepolicy.config.correction import presets
from onepolicy.correct.presets import preset

RUNNING = [name for name in presets() if preset(name).centering == "none"]


def test_the_receipt_of_a_run(train, capsys):
    """bf16 rollouts, fp32 training, without replay: ordinary mismatch, so no bug is suspected."""
    run = train("mis", "steps=1", "eval.every=0", "replay.mode=off", "correction.preset=mis", "model.dtype=float32")
    row = rows(run)[0]
    assert row["correction/slots"] >= row["correction/kept"] > 0
    assert row["correction/weight_mean"] == pytest.approx(1)
    assert {"correction/rejected/ratio.token", "correction/rejected/ratio.min.sequence"} <= set(row)
    assert row["correction/ratio_q01"] <= row["correction/ratio_q50"] <= row["correction/ratio_q99"]
    assert "looks like a bug" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["score-centering", "score-centering-tis"])
def test_a_preset_that_cannot_take_effect_is_refused(recipe, name, capsys, tmp_path):
    settings = [f"correction.preset={name}", "objective.preset=reinforce"]
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}", *settings]) == 2
    assert "which no engine here returns" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNNING)
def test_twenty_steps_of_every_preset(train, name):
    objective = "rloo" if preset(name).surrogate == "pg" else "grpo"
    settings = [f"correction.preset={name}", f"objective.preset={objective}", "objective.mini_steps=2"]
    found = rows(train(name, "steps=20", "eval.every=0", "replay.mode=off", *settings))
    assert len(found) == 20
    for row in found:
        assert row["train/loss"] is not None
        assert 0 <= row["correction/rejected"] <= 1
