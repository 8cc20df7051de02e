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
    assert "Not a real engine" in out
    for name in ("run.json", "summary.json"):
        assert json.loads((run / name).read_text())["pressure"].startswith(LINE)
    assert f"Not a real engine: {LINE}" in (run / "report.html").read_text()
    assert main(["audit", str(run)]) == 0
    assert f"pressed: not a real engine: {LINE}" in " ".join(capsys.readouterr().out.split())
    stored = json.loads((run / "config.json").read_text())["rollout"]["pressure"]
    assert stored["kind"] == "routing"
    assert stored["scale"] == 1.0


@pytest.mark.full
def test_without_replay_the_gap_is_trained_on(train, capsys):
    strong = ("rollout.pressure={scale=4.0}", "rollout.prompts_per_step=8")
    run = train("off", *strong, FLOAT32, "replay.mode=off", "steps=1", "eval.every=0")
    (row,) = rows(run)
    assert row["mismatch/k3"] > 1e-4
    assert 0 <= row["train/halved_gradient"] < 1  # 0 if no reward differs from its siblings'
    assert "looks like a bug" not in capsys.readouterr().out


@pytest.mark.full
def test_scale_0_is_the_run_without_pressure_and_an_evaluation_has_none(train):
    settings = (FLOAT32, UNGUARDED, "steps=2")
    plain = train("plain", *settings)
    assert_same_run(train("idle", "rollout.pressure={scale=0.0}", *settings), plain, 2)
    pressed = train("pressed", "rollout.pressure={scale=3.0}", *settings)
    assert evaluation(rows(pressed)[0]) == evaluation(rows(plain)[0])
    assert timeless(rows(pressed)[1]) != timeless(rows(plain)[1])


@pytest.mark.full
def test_resume_to_the_bit_and_noise_that_is_drawn_again(train, subtests):
    """The noise depends on the seed and the version of the weights, not on where the run began.
    Redrawn noise differs from the second version on."""
    first = []
    for name, pressure in (("once", PRESSURE), ("redrawn", REDRAWN)):
        every_step = (pressure, FLOAT32, UNGUARDED, "checkpoint.every=1", "eval.every=0")
        whole = train(f"{name}-whole", *every_step, "steps=3")
        part = train(f"{name}-part", *every_step, "steps=1")
        with subtests.test(name):
            assert main(["train", "--resume", str(part), "steps=3"]) == 0
            assert_same_run(whole, part, 3)
        first.append(rows(whole))
    once, redrawn = first
    assert timeless(once[0]) == timeless(redrawn[0])
    assert timeless(once[1]) != timeless(redrawn[1])


def test_refusals(recipe, policy, tmp_path, capsys):
    train = ["train", str(recipe), f"out={tmp_path / 'x'}"]
    for command, message in [
        ([*train, PRESSURE], "replay.min_agreement: 0.8 refuses routes"),
        (
            [*train, "rollout.pressure={scale=1.0, layers=[1, 9]}", UNGUARDED],
            "rollout.pressure.layers: [9] are no MoE layers",
        ),
        (
            ["engine", "check", str(policy), "rollout.pressure.scale=1", UNGUARDED],
            "engine check asks if an engine is right",
        ),
    ]:
        assert main(command) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [pytest.param("train.ranks=2", marks=pytest.mark.process), "rollout.max_staleness=1"],
)
def test_replay_removes_the_gap_beside_other_options(train, setting):
    """On ranks every step. While sampling, what is left is the age of the weights."""
    pressed = (PRESSURE, FLOAT32, "steps=3", "eval.every=0", setting)
    replayed = rows(train("r3", *pressed, UNGUARDED))
    off = rows(train("off", *pressed, "replay.mode=off", "correction.preset=recompute"))
    if setting.startswith("train"):
        assert all(row["mismatch/k3"] < 1e-9 for row in replayed)
    assert replayed[0]["mismatch/k3"] < 1e-9 < 1e-5 < off[0]["mismatch/k3"]
