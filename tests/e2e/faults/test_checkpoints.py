"""Damaged checkpoints: one flipped bit or a cut in every file. Each is named and never loaded, and
the run can resume from the one before."""

import shutil

import pytest

from onepolicy.build import learner
from onepolicy.cli import main
from onepolicy.rollout import copies
from onepolicy.train import checkpoint
from support.faulty_runs import assert_complete, assert_same_run

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("ranks", [0, 2])
def test_damage_to_every_file(ranks, request, tmp_path, capfd, monkeypatch):
    whole = request.getfixturevalue("whole_on_ranks" if ranks else "whole")
    out = shutil.copytree(whole, tmp_path / "run")
    (out / "summary.json").unlink()
    newest = checkpoint.checkpoint_folder(out, 6)
    log = (out / "metrics.jsonl").read_bytes()
    resume = ["train", "--resume", str(out), "steps=7"]

    def loaded(*_, **__):
        pytest.fail("weights were loaded before the check")

    def refused(name):
        assert main(resume) == 2
        message = capfd.readouterr().err
        assert str(newest / name) in message
        assert "delete the folder to fall back to an older checkpoint" in message
        assert (out / "metrics.jsonl").read_bytes() == log

    there = [path for path in newest.rglob("*") if path.is_file() and path.name != checkpoint.STATE]
    files = sorted(str(path.relative_to(newest)) for path in there)
    assert any(name.startswith("shards/") for name in files) == bool(ranks)
    with monkeypatch.context() as patch:
        for module in (learner, copies):
            patch.setattr(module, "load_model", loaded)
        for name in files:
            good = (newest / name).read_bytes()
            middle = len(good) // 2
            flipped = good[:middle] + bytes([good[middle] ^ 4]) + good[middle + 1 :]
            for bad in (flipped, good[:middle], b""):
                (newest / name).write_bytes(bad)
                refused(name)
            (newest / name).write_bytes(good)
        good = (newest / checkpoint.STATE).read_text()
        other = [
            good.replace('"step": 6', '"step": 5'),
            good.replace('"updates": 6', '"updates": 7'),
        ]
        for bad in ("", "{", *other):
            (newest / checkpoint.STATE).write_text(bad)
            refused(checkpoint.STATE)
    shutil.rmtree(newest)
    assert main(["train", "--resume", str(out)]) == 0
    assert_complete(out, 6)
    assert_same_run(whole, out, 6)
