"""Resume: the same next steps as an uninterrupted run, to the bit, also after a SIGKILL at any
moment."""

import json
import random
import shutil
import time
from contextlib import nullcontext

import pytest
import torch

from onepolicy.build import room
from onepolicy.cli import main
from onepolicy.config.stored_config import read_stored_config
from onepolicy.run import resume, run_folder
from onepolicy.run import train as start
from onepolicy.train import checkpoint
from support.metrics import rows
from support.resumed_runs import (
    EVERY,
    assert_same_run,
    finish,
    kill_in_the_update_of,
    next_command,
    run_and_kill,
)


@pytest.mark.parametrize(
    ("dtype", "changed"),
    [
        ("float32", ()),
        pytest.param("float32", ("optim.state=host",), marks=pytest.mark.full),
        pytest.param("bfloat16", (), marks=pytest.mark.full),
    ],
)
def test_resume_is_bit_equal(train, dtype, changed):
    settings = [f"model.dtype={dtype}", f"rollout.engine.dtype={dtype}"]
    settings.append("log.counterfactual_every=1")  # a last step is always probed
    whole, part = train("whole", "steps=3", *settings), train("part", "steps=2", *settings)
    assert main(["train", "--resume", str(part), "steps=3", *changed]) == 0
    assert_same_run(whole, part, 3)
    assert (whole / "samples.jsonl").read_text() == (part / "samples.jsonl").read_text()


@pytest.mark.full
def test_a_resume_has_the_longest_sequence_that_was_fitted_at_the_start(train, monkeypatch):
    """The GPU is made up: both starts take it for one, and find another length that fits."""
    for module in (start, resume):
        monkeypatch.setattr(module, "parse_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(room, "fit_max_len", lambda *_, **__: 64)
    run = train("run", "steps=2")
    assert read_stored_config(run).rollout.engine.max_len == 64
    monkeypatch.setattr(room, "fit_max_len", lambda *_, **__: 32)
    assert main(["train", "--resume", str(run), "steps=3"]) == 0
    assert read_stored_config(run).rollout.engine.max_len == 64


def test_resumes_of_a_run_that_has_all_its_steps(train, capsys, monkeypatch):
    """One that is finished, that another process trains, or that was killed before its summary."""
    run = train("run", "steps=2", "eval.every=0", "log.report=true", "optim.lr_decay=linear")
    summary = (run / "summary.json").read_text()
    assert main(["train", "--resume", str(run)]) == 2
    assert "already finished 2 of 2 steps" in capsys.readouterr().err
    with run_folder.lock_run(run):
        assert main(["train", "--resume", str(run), "steps=3"]) == 2
    assert "another process" in capsys.readouterr().err
    (run / "summary.json").unlink()
    (run / "report.html").unlink()
    joined = []
    with monkeypatch.context() as patch:  # the other ranks wait for rank 0, which has no work
        patch.setattr(resume, "started_ranks", lambda *_: joined.append(1) or nullcontext())
        assert main(["train", "--resume", str(run)]) == 0
    assert joined
    assert (run / "summary.json").read_text() == summary
    assert (run / "report.html").exists()
    moved = "steps: 2 -> 3 moves the end of optim.lr_decay = linear"
    assert moved not in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "steps=3"]) == 0
    assert moved in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_cut_to_its_newest_checkpoint_has_no_later_rows(train):
    """It was killed in its third step, which no checkpoint holds."""
    run = train("run", "steps=3", "eval.every=0", "log.counterfactual_every=1")
    shutil.rmtree(checkpoint.checkpoint_folder(run, 3))
    (run / "summary.json").unlink()
    assert main(["train", "--resume", str(run), "steps=2"]) == 0
    assert [row["step"] for row in rows(run)] == [1, 2]
    probes = sorted(path.name for path in (run / "probes").glob("*.safetensors"))
    assert probes == ["step_00001.safetensors", "step_00002.safetensors"]
    assert read_stored_config(run).steps == 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2


@pytest.mark.full
@pytest.mark.process
def test_killed_in_the_middle_resumes_to_the_same_run(train, recipe, tmp_path):
    whole, out = train("whole", "steps=4", *EVERY), tmp_path / "killed"
    kill_in_the_update_of(3, next_command(recipe, out, 4))
    assert [row["step"] for row in rows(out) if row["step"]] == [1, 2]
    assert not (out / "summary.json").exists()
    finish(recipe, out, 4)
    assert_same_run(whole, out, 4)


def random_moment(out, generator):
    """Return a condition that draws the moment of a kill: after a few seconds (start-up included),
    or soon after the second new checkpoint, at the latest at the fourth. On a fast machine steps
    are left for the next kills."""
    started, so_far = time.monotonic(), len(list(out.glob("checkpoints/step_*")))
    patience, lag, seen = generator.uniform(3, 14), generator.uniform(0, 0.5), []

    def now():
        new = len(list(out.glob("checkpoints/step_*"))) - so_far
        if not seen and new >= 2:
            seen.append(time.monotonic())
        return (
            new >= 4
            or time.monotonic() > started + patience
            or (seen and time.monotonic() > seen[0] + lag)
        )

    return now


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments(train, recipe, tmp_path):
    """Moments are drawn over start-up, rollout, update, evaluation and save alike, and each kill
    hits a live process."""
    steps, generator = 300, random.Random(1)
    whole, out = train("whole", f"steps={steps}", *EVERY), tmp_path / "killed"
    for _ in range(20):
        killed = run_and_kill(next_command(recipe, out, steps), random_moment(out, generator))
        assert killed, "ended before its kill"
    finish(recipe, out, steps)
    assert_same_run(whole, out, steps)


@pytest.mark.full
def test_an_evaluation_leaves_no_state_that_a_resumed_run_lacks(train, tmp_path, capsys):
    """Prompts share a long prefix and rollouts are in fp32, so a prefix that an evaluation left in
    the engine would show. The file of problems has a blank line more as the run resumes, which
    changes no problem."""
    data = tmp_path / "data.jsonl"
    prompts = [f"11+22-33*44+55-66*7+{i:02}=" for i in range(40)]
    data.write_text("\n".join(json.dumps({"prompt": each, "answer": "1"}) for each in prompts))
    settings = ["task.kind=jsonl", f"task.path={data}", "task.held_out=4", "eval.every=1"]
    settings += ["rollout.engine.dtype=float32", "rollout.engine.max_len=64"]
    settings += ["log.counterfactual_every=1"]
    whole = train("whole", "steps=3", *settings)
    part = train("part", "steps=2", *settings)
    data.write_text(data.read_text() + "\n")
    capsys.readouterr()
    assert main(["train", "--resume", str(part), "steps=3"]) == 0
    assert f"WARNING: {data} is not as it was" in " ".join(capsys.readouterr().out.split())
    assert_same_run(whole, part, 3)


@pytest.mark.full
def test_resume_drops_later_scores_and_ignores_unfinished_files(train):
    settings = ("eval.every=0", "log.counterfactual_every=1", "checkpoint.every=1")
    run = train("run", "steps=2", *settings)
    shutil.rmtree(checkpoint.checkpoint_folder(run, 2))
    (run / "probes" / "step_00002.writing").write_bytes(b"half")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "train/rew')
    run_folder.drop_probes_after(run, 1)
    probes = sorted(path.name for path in (run / "probes").glob("*.safetensors"))
    assert probes == ["step_00001.safetensors"]
    assert main(["train", "--resume", str(run)]) == 0
    assert [row["step"] for row in rows(run)] == [1, 2]
