"""The verdict of benchmarks/soak.py names every way in which a disturbed run can be wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file
from soak_outcome import failed, figure, last_step, outcome

STEPS = 6
STRIKES = [
    {"whom": "driver", "step": 2, "lost": 2, "seconds": 9.0},
    {"whom": "rank", "step": 4, "lost": 1, "seconds": 5.0},
    {"whom": "driver", "step": 5, "lost": 2, "seconds": 4.0},
    {"whom": "driver", "step": 6, "lost": 0, "seconds": None},
]


def write(run, rows, weights):
    checkpoint = run / "checkpoints" / f"step_{STEPS:05d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file({"w": weights}, checkpoint / "model.safetensors")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "samples.jsonl").write_text("{}\n")


def row(step, seconds):
    metrics = {"train/reward": step / 10, "train/response_length": 14.5, "mismatch/k3": 1e-14}
    metrics |= {"correction/slots": 32 * 14.5, "time/step": seconds}
    replay = {"replay/missing_samples": 0.0, "replay/native_rows": 0.0}
    return {"step": step} | metrics | replay


@pytest.fixture
def rows():
    return [row(step, 2.0) for step in range(1, STEPS + 1)]


@pytest.fixture
def judged(rows, tmp_path):
    """Return judged(weights of the disturbed run) -> the conditions that did not hold, with `rows`
    as its log."""
    write(tmp_path / "whole", [row(step, 1.0) for step in range(1, STEPS + 1)], torch.ones(3))

    def judge(weights=None):
        write(tmp_path / "killed", rows, torch.ones(3) if weights is None else weights)
        return failed(outcome(tmp_path, STEPS, STRIKES))

    return judge


def test_equal_but_for_times_is_right(judged):
    assert judged() == []


def test_a_step_that_counts_twice_or_is_missing(judged, rows):
    rows.insert(3, rows[3])
    assert "every_step_once" in judged()
    del rows[2:4]
    assert "every_step_once" in judged()


@pytest.mark.parametrize(
    ("metric", "value", "name"),
    [
        ("correction/slots", 31 * 14.5, "samples_exact"),
        ("mismatch/k3", 1e-8, "sampled_from_the_learners_weights"),
        ("mismatch/k3", float("nan"), "sampled_from_the_learners_weights"),
        ("replay/native_rows", 1.0, "sampled_from_the_learners_weights"),
        ("train/reward", 0.4001, "metrics_bit_equal"),
    ],
)
def test_one_number_of_one_step(judged, rows, metric, value, name):
    rows[3][metric] = value
    assert name in judged()


def test_weights(judged):
    assert judged(torch.tensor([1.0, 1.0, 1.0 + 2**-23])) == ["weights_bit_equal"]
    assert "weights_finite" in judged(torch.tensor([1.0, 1.0, float("nan")]))


def test_a_reward_that_does_not_rise(judged, rows):
    for each, reward in zip(rows, [0.4, 0.6, 0.5, 0.5, 0.6, 0.41], strict=True):
        each["train/reward"] = reward
    assert "reward_rose" in judged()


def test_cost_and_places_of_the_kills(judged, tmp_path):
    judged()
    found = outcome(tmp_path, STEPS, STRIKES)
    for whom, *numbers in (("all", 4, 5, 5.0, 9.0), ("driver", 3, 4, 6.5, 9.0)):
        names = ("kills", "steps_recomputed", "seconds_median", "seconds_largest")
        assert found["cost"][whom] == dict(zip(names, numbers, strict=True))
    drawn = figure(tmp_path, STRIKES, found).data
    names = ["in peace", "with kills", "killed: driver (3)", "killed: rank (1)"]
    assert [each["name"] for each in drawn] == names
    assert drawn[2]["x"] == [2, 5, 6]
    assert drawn[2]["y"] == pytest.approx([0.15, 0.3, 0.35])


def test_the_last_step_of_a_log_that_is_being_written(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert last_step(tmp_path) == 2
