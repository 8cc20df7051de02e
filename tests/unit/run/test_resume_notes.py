"""A resume says where it goes on, and from what it began."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepolicy.config import UsageError, resolve
from onepolicy.run.loop import clean_folder
from onepolicy.run.resume import _note_changed_problems, _note_resume, note_fork, resume_origin
from onepolicy.run.run_folder import (
    FROM_SCRATCH,
    RunOrigin,
    create_run_folder,
    read_about,
    write_config,
)

PARENT = {"run": "runs/other", "step": 4}


@pytest.mark.parametrize(
    ("origin", "start"),
    [(RunOrigin(), "step 0"), (RunOrigin(4, parent=PARENT), "step 4 of runs/other")],
)
def test_a_run_without_a_checkpoint_starts_again(origin, start, tmp_path):
    (tmp_path / "run.json").write_text('{"parent": null, "id": "0123abcd"}')
    notes = []
    _note_resume(tmp_path, origin, "{}", SimpleNamespace(note=notes.append))
    assert notes == [f"resuming {tmp_path}: it has no checkpoint, so it starts again at {start}"]


def test_a_fork_without_a_checkpoint_does_not_start_from_a_damaged_parent(tmp_path):
    parent = tmp_path / "parent"
    (parent / "checkpoints" / "step_00004").mkdir(parents=True)
    about = {"parent": {"run": str(parent), "step": 4}, "id": "0123abcd"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    with pytest.raises(UsageError, match=r"step_00004: half written \(no state.json\)"):
        resume_origin(tmp_path)


def jsonl(folder):
    return {"kind": "jsonl", "path": str(folder / "a.jsonl"), "held_out": 1}


def react(folder):
    return {"kind": "react", "problems": jsonl(folder), "tools": [{"kind": "calculator"}]}


def with_held_out(folder):
    paths = {"path": str(folder / "a.jsonl"), "held_out_path": str(folder / "held_out_a.jsonl")}
    return {"kind": "jsonl"} | paths


@pytest.mark.parametrize(
    ("task", "files"),
    [(jsonl, ["a.jsonl"]), (react, ["a.jsonl"]), (with_held_out, ["a.jsonl", "held_out_a.jsonl"])],
)
def test_a_file_of_problems_that_was_changed_is_named(task, files, tmp_path):
    """A line more moves a held-out line, which is then trained on."""
    for name in files:
        (tmp_path / name).write_text("abc")
    run, paths = tmp_path / "run", [str(tmp_path / name) for name in files]
    tree = {"out": str(run), "steps": 3, "model": {"path": "tiny"}, "task": task(tmp_path)}
    config = resolve(tree)
    create_run_folder(run, config, FROM_SCRATCH, "{}")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert read_about(run)["problems"] == {p: {"bytes": 3, "sha256": abc} for p in paths}
    notes = []
    progress = SimpleNamespace(note=notes.append)
    _note_changed_problems(run, config, progress)
    assert notes == []
    for path in paths:
        Path(path).write_text("abcd")
    _note_changed_problems(run, config, progress)
    assert [note.split(" is not as")[0] for note in notes] == [f"WARNING: {p}" for p in paths]
    assert all("held out may be trained on now" in note for note in notes)
    for path in paths:
        Path(path).unlink()  # the task's own error names a file that is gone
    _note_changed_problems(run, config, progress)
    assert len(notes) == len(paths)
    for path in paths:
        Path(path).write_text("abcd")
    (run / "run.json").write_text('{"parent": null}')  # of a run from before there were digests
    _note_changed_problems(run, config, progress)
    assert len(notes) == len(paths)


def test_a_run_that_goes_on_has_no_summary_and_no_report(tmp_path):
    """Both say that it has finished."""
    for name in ("summary.json", "report.html", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    clean_folder(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], []),
        (["optim.warmup_steps=12"], []),
        (
            ["optim.warmup_steps=10"],
            ["10 of the 10 updates before, so this run begins at the full"],
        ),
        (["rollout.prompts_per_step=4"], ["so this run plays 12 problems again"]),
        (["objective.dynamic_sampling=1"], ["so this run passes over 24 problems"]),
    ],
)
def test_a_fork_says_what_its_parent_has_used_up(settings, words, tmp_path):
    """After 3 steps of 8 problems, and 10 optimiser steps."""
    tree = {"out": "unused", "steps": 9, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
    parent, notes = resolve(tree, ["rollout.prompts_per_step=8"]), []
    write_config(tmp_path, parent)
    weights = tmp_path / "checkpoints" / "step_00003"
    weights.mkdir(parents=True)
    (weights / "state.json").write_text('{"step": 3, "updates": 10, "files": {}}')
    origin = RunOrigin(3, weights, {"run": str(tmp_path), "step": 3})
    config = resolve(tree, ["rollout.prompts_per_step=8", *settings])
    note_fork(config, origin, SimpleNamespace(note=notes.append))
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
