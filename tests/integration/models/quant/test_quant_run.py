"""Runs with quantised rollouts: they are logged, evaluated, calibrated, replayed and resumed."""

import json

import pytest

from onepolicy.cli import main
from support.metrics import rows
from support.resumed_runs import assert_same_run

STATIC = 'rollout.quant={format="int8", activations="static"}'


def evaluation(row):
    return {name: value for name, value in row.items() if name.startswith("eval/")}


@pytest.mark.full
def test_evaluation_sees_unquantised_weights(train):
    """Weights in 2 bits write nonsense, but evaluate as the unquantised ones do, unless asked
    otherwise."""
    coarse = ["rollout.quant.format=simulated", "rollout.quant.bits=2", "steps=1"]
    plain = train("plain", "steps=1")
    run = train("coarse", *coarse)
    quantised = train("quantised", *coarse, "eval.quantised=true")
    assert evaluation(rows(run)[0]) == evaluation(rows(plain)[0])
    assert evaluation(rows(quantised)[0]) != evaluation(rows(plain)[0])
    assert rows(run)[1]["mismatch/k3"] > 100 * rows(plain)[1]["mismatch/k3"]


@pytest.mark.full
def test_calibrated_run_resumes_to_the_bit(train):
    every_step = (STATIC, "checkpoint.every=1", "log.counterfactual_every=1", "eval.every=0")
    whole = train("whole", *every_step, "steps=2")
    part = train("part", *every_step, "steps=1")
    assert main(["train", "--resume", str(part), "steps=2"]) == 0
    assert (whole / "calibration.json").read_text() == (part / "calibration.json").read_text()
    assert_same_run(whole, part, 2)
    about = json.loads((whole / "run.json").read_text())["quant"]
    experts = next(part for part in about["parts"] if part["part"] == "experts")
    assert about["activations"] == "static"
    assert experts["bytes_after"] < 0.65 * experts["bytes_before"]
    last = rows(whole)[-1]
    assert 0 <= last["quant/clipped"] < 0.01
    assert last["quant/drift_mean"] == pytest.approx(1, abs=0.2)


def test_quantised_routes_are_replayed(train):
    """The routers of the quantised engine and of the trainer differ, and the trainer computes with
    the engine's experts."""
    settings = ("rollout.quant=int8", "log.counterfactual_every=1", "eval.every=0")
    row = rows(train("int8", "steps=1", *settings))[0]
    assert row["counterfactual/routing/routers"] > 0
    assert 0.9 < row["replay/gate_mass"] < 1
    assert row["mismatch/k3"] != row["counterfactual/mismatch/k3"]


@pytest.mark.full
def test_a_correction_trains_without_replay(train):
    correction = ("replay.mode=off", "correction.preset=tis")
    run = train("tis", "rollout.quant=int8", *correction, "steps=1", "eval.every=0")
    assert rows(run)[0]["mismatch/k3"] > 0
