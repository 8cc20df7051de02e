"""Whole asynchronous runs: staleness 0 equals the synchronous loop to the bit, and larger values
overlap within their bound. A kill loses the episodes in play, and no sample is trained on twice or
in part."""

import json
import threading

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.report.terminal import summary_parts
from onepolicy.run import loop
from onepolicy.train import checkpoint
from support.metrics import rows, timeless

OWN = ("staleness/", "mismatch/k3_staleness")


def common(run):
    return [{k: v for k, v in timeless(row).items() if not k.startswith(OWN)} for row in rows(run)]


def samples(run, until=5):
    """Return the samples of the steps up to this one."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] <= until]


def problems(run, until=5):
    return [(line["step"], line["problem"]) for line in samples(run, until)]


def assert_same_weights(a, b, step):
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(checkpoint.checkpoint_folder(r, step) / name) for r in (a, b))
        assert all(torch.equal(first[key], second[key]) for key in first)


EVALUATED = ("eval.every=1", "log.counterfactual_every=1")  # a last step is always probed


@pytest.fixture(scope="module")
def synchronous(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("synchronous") / "run"
    assert main(["train", str(recipe), f"out={out}", "steps=5", *EVALUATED]) == 0
    return out


@pytest.mark.full
def test_staleness_zero_is_the_synchronous_loop_to_the_bit(synchronous, train):
    """Resumed too."""
    other = train("other", "steps=2", *EVALUATED, "rollout.max_staleness=0")
    assert main(["train", "--resume", str(other), "steps=4"]) == 0
    assert common(other) == common(synchronous)[:5]
    assert samples(other) == samples(synchronous, 4)
    assert_same_weights(other, synchronous, 4)
    for row in rows(other)[1:]:
        assert (row["staleness/max"], row["staleness/spanning"]) == (0, 0)
        assert row["async/sampler_busy"] < 1


@pytest.fixture(scope="module")
def overlapping(recipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("overlapping") / "run"
    settings = ["steps=5", "rollout.max_staleness=2", "eval.every=3", "log.report=true"]
    settings += ["optim.lr=1e-4"]  # at 1e-3 two updates may move every fifth router
    assert main(["train", str(recipe), f"out={out}", *settings]) == 0
    return out


def test_tokens_are_old_but_never_older_than_allowed(overlapping):
    found = [row for row in rows(overlapping) if "staleness/max" in row]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[0]["staleness/max"] == 0
    assert [row["staleness/max"] <= 2 for row in found] == [True] * 5
    assert max(row["staleness/max"] for row in found) >= 1
    for row in found:
        tokens = sum(v for k, v in row.items() if k.startswith("staleness/tokens@"))
        assert tokens == row["correction/slots"]
        assert row["correction/weight_max"] <= 2  # TIS, though routes are replayed


@pytest.mark.full
def test_problems_come_in_the_same_order(overlapping, synchronous):
    assert problems(overlapping) == problems(synchronous)


def test_summary_and_report_show_the_overlap(overlapping):
    summary = json.loads((overlapping / "summary.json").read_text())["asynchronous"]
    assert summary["max_staleness"] == 2
    assert 0 < summary["staleness_mean"] <= summary["staleness_max"] <= 2
    assert 0 < summary["learner_busy"] <= 1
    page = (overlapping / "report.html").read_text()
    assert 'id="fig-staleness"' in page
    assert "which is part of it: k3 by age is below" in page
    console = Console(width=200, record=True)
    for part in summary_parts(json.loads((overlapping / "summary.json").read_text())):
        console.print(part)
    assert "Sampled while learning" in console.export_text()


@pytest.mark.full
def test_a_kill_loses_only_the_episodes_in_play(recipe, synchronous, tmp_path, monkeypatch):
    """The kill comes right after the checkpoint of step 2, while episodes of steps 3 to 5 are in
    play. They have the event loop to themselves while it is written."""
    out, saved, threads = tmp_path / "run", loop.checkpoint.save, set()

    def killing(*arguments, step, **more):
        threads.add(threading.current_thread())
        saved(*arguments, step=step, **more)
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop.checkpoint, "save", killing)
    settings = ["steps=5", "rollout.max_staleness=2", "checkpoint.every=1", "eval.every=0"]
    assert main(["train", str(recipe), f"out={out}", *settings]) != 0
    assert [row["step"] for row in rows(out)] == [1, 2]
    assert threads
    assert threading.main_thread() not in threads
    monkeypatch.undo()
    assert main(["train", "--resume", str(out)]) == 0
    found = rows(out)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    assert found[2]["staleness/max"] == 0  # sampled again, by the weights of the checkpoint
    assert problems(out) == problems(synchronous, 5)  # both groups of every step, once
