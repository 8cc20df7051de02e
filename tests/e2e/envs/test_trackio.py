"""trackio gets every row, in the venv of the environments, because it pins Pillow below 13."""

import pytest

from onepolicy.config import resolve
from onepolicy.run.log import RunLog
from onepolicy.run.trackers import check_log, trackers_of

pytestmark = pytest.mark.envs


def test_trackio_gets_every_row_and_a_resumed_run_is_the_same(monkeypatch, tmp_path):
    utils = pytest.importorskip("trackio.utils")
    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"parent": null, "id": "0123abcd"}')
    config = resolve(
        {
            "out": "runs/one",
            "steps": 3,
            "model": {"path": "tiny"},
            "task": {"kind": "chain"},
            "log": {"tensorboard": False, "report": False, "trackio": "mismatch"},
        }
    )
    check_log(config)
    with RunLog(tmp_path / "one", trackers_of(config, print)) as log:
        log.write(1, {"train/reward": 0.25, "mismatch/k3": 1e-5})
        log.write(2, {"train/reward": 0.5})
    with RunLog(tmp_path / "one", trackers_of(config, print)) as log:
        log.write(3, {"train/reward": 0.75})
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("mismatch")
    assert name == "one-0123abcd"
    rows = SQLiteStorage.get_logs("mismatch", name)
    assert [(row["step"], row["train/reward"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]
