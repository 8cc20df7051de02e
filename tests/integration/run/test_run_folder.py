"""Run folders through the command line: damaged, of other kinds of files, already taken, without a
checkpoint."""

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from onepolicy.cli import main
from onepolicy.config import UsageError
from onepolicy.run import loop as run_loop
from onepolicy.run.run_folder import lock_run


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """Make a finished run of 2 steps with one checkpoint and one counterfactual score."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), f"out={out}", "steps=2", "eval.every=0"]) == 0
    return out


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def commands(run):
    """Return every command that reads a run folder."""
    return {
        "resume": ["train", "--resume", str(run), "steps=3"],
        "fork": ["train", "--from", str(run), f"out={run.parent / 'fork'}", "steps=3"],
        "eval": ["eval", str(run), "eval.problems=2", "eval.k=1"],
        "audit": ["audit", str(run)],
    }


READ_BY = [
    ("config.json", ("resume", "fork", "eval")),
    ("run.json", ("resume",)),
    ("metrics.jsonl", ("resume",)),
    ("samples.jsonl", ("resume",)),
    ("checkpoints/step_00002/state.json", ("resume", "fork", "eval")),
    ("probes/step_00002.safetensors", ("audit",)),
]


def test_one_damaged_byte_gives_one_message_in_every_command(copy, capsys, subtests):
    for name, readers in READ_BY:
        whole = (copy / name).read_bytes()
        (copy / name).write_bytes(whole[:12] + b"\x80" + whole[13:])
        for reader in readers:
            with subtests.test(name, reader=reader):
                assert main(commands(copy)[reader]) == 2
                *doing, said = capsys.readouterr().err.splitlines()
                assert all(line.startswith("onepolicy: ") for line in doing), doing
                assert said.startswith("onepolicy: ")
                assert str(copy / name) in said
        (copy / name).write_bytes(whole)


def test_a_log_that_is_lost_or_changed_beside_a_good_checkpoint_is_said(copy, capsys, subtests):
    (copy / "summary.json").unlink()  # the resume only writes it again
    for name in ("metrics.jsonl", "samples.jsonl"):
        path = copy / name
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        for kept in ([*lines[1:]], lines[:-1], [whole.replace(b"0.", b"1.", 1)]):
            path.write_bytes(b"".join(kept))
            with subtests.test(name, kept=len(kept)):
                assert main(["train", "--resume", str(copy)]) == 0
                assert f"WARNING: {path} is not as it was at the" in capsys.readouterr().out
            (copy / "summary.json").unlink()
        path.write_bytes(whole)
        assert main(["train", "--resume", str(copy)]) == 0
        assert "WARNING" not in capsys.readouterr().out
        (copy / "summary.json").unlink()


def test_state_of_another_type(copy, capsys, subtests):
    path = copy / "checkpoints" / "step_00002" / "state.json"
    state = json.loads(path.read_text())
    state.pop("sha256 of the rest")
    for change in ({"files": True}, {"step": None}, {"updates": "1"}, {"sha256": [1]}, {"step": 7}):
        path.write_text(json.dumps(state | change))
        for reader in ("resume", "fork", "eval"):
            with subtests.test(change=change, reader=reader):
                assert main(commands(copy)[reader]) == 2
                said = capsys.readouterr().err
                assert f"{path}: {next(iter(change))} is " in said
                assert "delete the folder to fall back to an older checkpoint" in said


def test_files_where_folders_belong(copy, capsys):
    for name in ("checkpoints", "probes", "tensorboard"):
        shutil.rmtree(copy / name, ignore_errors=True)
        (copy / name).write_text("")
        assert main(commands(copy)["resume"]) == 2
        assert f"{copy / name}: must be a folder" in capsys.readouterr().err
        (copy / name).unlink()
    (copy / "checkpoints" / "step_99999").mkdir(parents=True)
    assert main(commands(copy)["resume"]) == 2
    assert "step_99999: half written" in capsys.readouterr().err
    (copy / "checkpoints" / "step_99999").rmdir()
    (copy / "checkpoints" / "step_99999").write_text("")
    assert main(commands(copy)["resume"]) == 2
    assert "step_99999: a checkpoint must be a folder" in capsys.readouterr().err


def test_stray_files_do_not_stop_a_resume(copy):
    """A file with the name of an unfinished checkpoint is removed. A file that is not the run's
    stays."""
    (copy / "checkpoints" / ".step_00003.writing").write_text("")
    (copy / "checkpoints" / ".step_00009.deleting").symlink_to(copy)
    (copy / "probes" / "step_abc.safetensors").write_text("")
    assert main(commands(copy)["resume"]) == 0
    names = sorted(each.name for each in (copy / "checkpoints").iterdir())
    assert names == ["step_00002", "step_00003"]
    assert (copy / "probes" / "step_abc.safetensors").exists()
    assert (copy / "config.json").exists()


def test_a_lock_that_cannot_be_taken_is_one_message(copy, capsys):
    (copy / ".lock").unlink()
    (copy / ".lock").mkdir()
    assert main(commands(copy)["resume"]) == 2
    words = f"{copy}: cannot be written to: Is a directory; make it writable, or copy it"
    assert words in capsys.readouterr().err


def test_a_file_system_without_locks_is_noted_once(tmp_path, capsys, monkeypatch):
    """Other errors of a lock still refuse the run."""
    number = errno.ENOLCK

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for number in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
        with lock_run(tmp_path):
            assert (tmp_path / ".lock").exists()
        assert capsys.readouterr().err.splitlines() == [
            f"onepolicy: {tmp_path}: cannot be locked: {os.strerror(number)}; no second process "
            "may train in it"
        ]
    number = errno.EACCES
    words = "cannot be written to: Permission denied"
    with pytest.raises(UsageError, match=words), lock_run(tmp_path):
        pass


@pytest.mark.full
def test_a_resume_without_a_checkpoint_reports_a_new_start(copy, capsys):
    shutil.rmtree(copy / "checkpoints")
    assert main(commands(copy)["resume"]) == 0
    words = f"resuming {copy}: it has no checkpoint, so it starts again at step 0"
    assert words in capsys.readouterr().out


@pytest.mark.full
def test_the_same_recipe_twice_makes_two_runs(recipe, tmp_path, capsys):
    out = tmp_path / "words"
    own = tmp_path / "own.toml"
    own.write_text(recipe.read_text().replace('"set by the test"', json.dumps(str(out))))
    quick = ["steps=1", "eval.every=0", "log.counterfactual_every=0"]
    for name in ("words", "words-2"):
        assert main(["train", str(own), *quick]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"run folder: {tmp_path / name}"
        stored = json.loads((tmp_path / name / "config.json").read_text())
        assert stored["out"] == str(tmp_path / name)
    assert main(["train", str(own), *quick, f"out={out}"]) == 2
    assert f"out: {out} is not empty" in capsys.readouterr().err


def with_report(run):
    config = json.loads((run / "config.json").read_text())
    config["log"]["report"] = True
    (run / "config.json").write_text(json.dumps(config))


def report_of_three_steps(run):
    """Return the line about it, after a look at the page."""
    assert "after step 3 of 5" in (run / "report.html").read_text("utf-8")
    assert not (run / "summary.json").exists()  # of the two steps that it had finished with
    return (
        f"onepolicy: report of the steps so far: {run / 'report.html'}; `onepolicy train --resume "
        f"{run}` continues the run"
    )


def test_ctrl_c_in_a_run_names_its_checkpoint_and_writes_its_report(copy, capsys, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_loop, "write_samples", interrupted)
    monkeypatch.setattr("signal.signal", lambda *a: None)
    assert main(["train", "--resume", str(copy), "steps=5"]) == 130
    assert not (copy / "report.html").exists()  # log.report is false
    with_report(copy)
    assert main(["train", "--resume", str(copy), "steps=5"]) == 130
    *_, stopped, last = capsys.readouterr().err.splitlines()
    words = f"is of step 2: `onepolicy train --resume {copy}` continues; finished steps that it "
    assert f"the last checkpoint of {copy} {words}computes again: 1" in stopped
    assert last == report_of_three_steps(copy)


STOPPED = """
import os, signal, sys, time
from onepolicy.cli import main
from onepolicy.run import loop
from onepolicy.sync import canary

def stop(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)

loop.write_samples, canary.CANARY_PROMPTS = stop, 4
main(["train", "--resume", sys.argv[1], "steps=5"])
"""


@pytest.mark.process
def test_sigterm_leaves_the_report_of_a_run(copy):
    with_report(copy)
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(copy)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGTERM
    *_, stopped, last = done.stderr.splitlines()
    assert f"stopped by SIGTERM; the last checkpoint of {copy} is of step 2" in stopped
    assert last == report_of_three_steps(copy)


@pytest.mark.full
def test_a_run_with_an_unprintable_name_is_whole(recipe, tmp_path, monkeypatch):
    """In ASCII, its report and summary are the same as in any encoding."""
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    torch.set_num_threads(1)
    assert main(["train", str(recipe), f"out={tmp_path / 'out'}", "steps=1", "eval.every=0"]) == 0
    written.flush()
    assert b"\\u2192" in written.buffer.getvalue()
    assert (tmp_path / "out" / "summary.json").exists()
