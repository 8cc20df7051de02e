"""Runs under routing pressure: replayed, evaluated without it, resumed to the bit, and loud."""

import json

import pytest

from onepolicy.cli import main
from support.metrics import rows, timeless
from support.resumed_runs import assert_same_run

PRESSURE = "rollout.pressure={scale=1.0}"
REDRAWN = 'rollout.pressure={scale=1.0, redraw="sync"}'
FLOAT32 = "rollout.engine.dtype=float32"
UNGUARDED = "replay.min_agreement=0"
LINE = "the engine is under artificial routing pressure (scale 1, all MoE layers"


def evaluation(row):
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def test_replay_removes_the_gap_and_the_run_says_that_it_was_made(train, capsys):
    more = ("steps=2", "log.counterfactual_every=1", "log.report=true", "eval.every=0")
    run = train("pressed", PRESSURE, FLOAT32, UNGUARDED, *more)
    for row in rows(run):
        assert row["mismatch/k3"] < 1e-9
        assert row["counterfactual/mismatch/k3"] > 1e-6
        assert row["counterfactual/routing/routers"] > 0.2
        assert row.get("train/halved_gradient", 0) == 0
    out = capsys.readouterr().out
    assert f"WARNING: {LINE}" in " ".join(out.split())
    assert "not a real engine" in out
    for name in ("run.json", "summary.json"):
        assert json.loads((run / name).read_text())["pressure"].startswith(LINE)
    assert f"Not a real engine: {LINE}" in (run / "report.html").read_text()
    assert main(["audit", str(run)]) == 0
    assert f"pressed: not a real engine: {LINE}" in " ".join(capsys.readouterr().out.split())
    stored = json.loads((run / "config.json").read_text())["rollout"]["pressure"]
    assert stored["kind"] == "routing"
    assert stored["scale"] == 1.0


def test_without_replay_the_gap_is_trained_on(train, capsys):
    strong = ("rollout.pressure={scale=4.0}", "rollout.prompts_per_step=8")
    run = train("off", *strong, FLOAT32, "replay.mode=off", "steps=1", "eval.every=0")
    (row,) = rows(run)
    assert row["mismatch/k3"] > 1e-4
    assert 0 <= row["train/halved_gradient"] < 1  # 0 if no reward differs from its siblings'
    assert "looks like a bug" not in capsys.readouterr().out


def test_scale_0_is_the_run_without_pressure(train):
    settings = (FLOAT32, UNGUARDED, "steps=2")
    idle = train("idle", "rollout.pressure={scale=0.0}", *settings)
    assert_same_run(idle, train("plain", *settings), 2)


def test_evaluation_has_no_pressure(train):
    """A run under pressure evaluates its first weights as a run without."""
    plain = train("plain", FLOAT32, UNGUARDED, "steps=1")
    run = train("pressed", "rollout.pressure={scale=3.0}", FLOAT32, UNGUARDED, "steps=1")
    assert evaluation(rows(run)[0]) == evaluation(rows(plain)[0])
    assert timeless(rows(run)[1]) != timeless(rows(plain)[1])


@pytest.mark.parametrize("settings", [PRESSURE, REDRAWN])
def test_resume_to_the_bit(train, settings):
    """The noise depends on the seed and the version of the weights, not on where the run began."""
    every_step = (settings, FLOAT32, UNGUARDED, "checkpoint.every=1", "eval.every=0")
    whole = train("whole", *every_step, "steps=3")
    part = train("part", *every_step, "steps=1")
    assert main(["train", "--resume", str(part), "steps=3"]) == 0
    assert_same_run(whole, part, 3)


def test_redrawn_noise_differs_from_the_second_version_on(train):
    settings = (FLOAT32, UNGUARDED, "steps=2", "eval.every=0")
    once, anew = (train(name, each, *settings) for name, each in (("a", PRESSURE), ("b", REDRAWN)))
    assert timeless(rows(once)[0]) == timeless(rows(anew)[0])
    assert timeless(rows(once)[1]) != timeless(rows(anew)[1])


def test_pressure_needs_the_guard_off(recipe, tmp_path, capsys):
    assert main(["train", str(recipe), f"out={tmp_path / 'x'}", PRESSURE]) == 2
    assert "replay.min_agreement: 0.8 refuses routes" in capsys.readouterr().err


def test_wrong_layers_are_refused_before_the_weights_are_loaded(recipe, tmp_path, capsys):
    pressure = "rollout.pressure={scale=1.0, layers=[1, 9]}"
    assert main(["train", str(recipe), f"out={tmp_path / 'x'}", pressure, UNGUARDED]) == 2
    assert "rollout.pressure.layers: [9] are no MoE layers" in capsys.readouterr().err


def test_engine_check_refuses_it(policy, capsys):
    overrides = ["rollout.pressure.scale=1", UNGUARDED]
    assert main(["engine", "check", str(policy), *overrides]) == 2
    assert "engine check asks if an engine is right" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["train.ranks=2", "rollout.max_staleness=1"])
def test_replay_removes_the_gap_beside_other_options(train, setting):
    """On ranks every step. While sampling, what is left is the age of the weights."""
    pressed = (PRESSURE, FLOAT32, "steps=3", "eval.every=0", setting)
    replayed = rows(train("r3", *pressed, UNGUARDED))
    off = rows(train("off", *pressed, "replay.mode=off", "correction.preset=recompute"))
    if setting.startswith("train"):
        assert all(row["mismatch/k3"] < 1e-9 for row in replayed)
    assert replayed[0]["mismatch/k3"] < 1e-9 < 1e-5 < off[0]["mismatch/k3"]
