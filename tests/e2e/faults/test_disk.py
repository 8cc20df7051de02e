"""A full disk in the middle of a checkpoint, of the log, or of a weight file. The run ends and can
be resumed."""

import contextlib
import re

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.run.log import read_metrics
from onepolicy.sync.weight_files import WeightFiles
from onepolicy.train import checkpoint
from support.faulty_runs import (
    Fault,
    assert_complete,
    assert_same_run,
    finished,
    rows,
    small_disk,
    start,
    steps_of,
    wait_for,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]
FULL = r"No space left on device|is the disk full"


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_full_in_the_middle_of_a_checkpoint(ranks, recipe, request, tmp_path):
    whole = request.getfixturevalue("whole_on_ranks" if ranks else "whole")
    size = size_of(checkpoint.checkpoint_folder(whole, 6))
    with small_disk(tmp_path / "disk", mib=max(1, int(1.6 * size / 2**20))) as (disk, grow):
        out = disk / "run"
        errors = finished(start(recipe, f"out={out}", f"train.ranks={ranks}"), status=1)
        # ranks save in the background, so the log's next row may be the first to fail
        assert re.search(FULL, errors)
        assert "--resume" in errors
        assert [p.name for p in checkpoint.complete_checkpoints(out)] == ["step_00002"]
        checkpoint.verify(checkpoint.latest_checkpoint(out))
        fault = Fault(out)
        grow(int(8 * size / 2**20) + 8)
        fault.resumed()
        assert_complete(out, 6)
        assert_same_run(whole, out, 6)


@pytest.mark.slow
def test_full_while_the_log_is_written(recipe, whole, tmp_path):
    """Complete rows stay. A resume on a disk that is still full reports it again, and later
    recomputes the rest."""
    with small_disk(tmp_path / "disk", mib=64) as (disk, grow):
        out = disk / "run"
        run = start(recipe, f"out={out}", "checkpoint.every=3")
        wait_for(lambda: len(steps_of(out)) >= 1, run)
        fill(disk / "filler")
        fault = Fault(out)
        errors = finished(run, status=1)
        fault.ended()
        assert re.search(rf"{out}: cannot be written to: .*({FULL})", errors)
        done = len(steps_of(out))
        # the last line may be cut short
        assert [row["step"] for row in read_metrics(out)] == list(range(1, done + 1))
        again = finished(start("--resume", out), status=1)
        assert "No space left on device" in again
        grow(128)
        Fault(out).resumed()
        assert_complete(out, 6)
        assert rows(out)[-1]["train/loss"] == rows(whole)[-1]["train/loss"]


def fill(path):
    """Fill the disk to the last byte."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 4096)


def test_full_while_weights_are_written_for_an_engine(tmp_path):
    """The version before stays whole and no incomplete version is offered. Free space is enough to
    go on."""
    weights = [(f"layer.{i}", torch.randn(128, 1024)) for i in range(10)]  # 0.5 MiB each
    with small_disk(tmp_path / "disk", mib=4) as (disk, grow):
        files = WeightFiles(str(disk))
        first = files.write_version(weights[:2], 0)
        with pytest.raises(TrainingError, match=r"weights of version 1: .*[Nn]o space left"):
            files.write_version(weights, 1)
        assert [each.name for each in files.folder.glob("version*")] == [first.name]
        grow(16)
        assert files.write_version(weights, 1).name == "version_1"
