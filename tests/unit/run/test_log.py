"""Metric sinks: the contents of the files, the rest after a kill, and the rows that a resume
keeps."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import UsageError
from onepolicy.report.jsonl import RENAMED
from onepolicy.run.log import RunLog, read_metrics, truncate_after
from onepolicy.run.metric_names import METRICS, is_known


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_samples(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5, "mismatch/k3": math.nan, "mismatch/chi2": math.inf})
        log.write(2, {"train/reward": 1, "eval/avg@16": 0.25, "counterfactual/mismatch/f1.25": 0.0})
        log.write_sample(
            {"step": 2, "response": "1+1=\u2028\ud800 \u00e9", "mean_logp_rollout": math.nan}
        )
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "train/reward": 0.5, "mismatch/k3": None, "mismatch/chi2": None},
        {"step": 2, "train/reward": 1.0, "eval/avg@16": 0.25, "counterfactual/mismatch/f1.25": 0.0},
    ]
    assert read_metrics(tmp_path) == lines(tmp_path / "metrics.jsonl")
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert "\u00e9".encode() in raw  # readable, not escaped
    assert json.loads(raw) == {
        "step": 2,
        "response": "1+1=\u2028\ud800 \u00e9",
        "mean_logp_rollout": None,
    }


def test_lines_are_in_the_file_during_the_run(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5})
        assert read_metrics(tmp_path) == [{"step": 1, "train/reward": 0.5}]


def test_unknown_name_is_refused_and_nothing_is_written(tmp_path):
    with (
        RunLog(tmp_path) as log,
        pytest.raises(ValueError, match="train/rewards"),
    ):
        log.write(1, {"train/reward": 0.5, "train/rewards": 0.5})
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("eval/pass@4", True),
        ("eval/pass@", False),
        ("eval/pass@k4", False),
        ("counterfactual/train/reward", False),
    ],
)
def test_patterns(name, known):
    assert is_known(name) is known


def test_a_metric_under_its_old_name_is_read_under_the_new_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/probe": 2.0}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "time/counterfactual": 2.0}]
    assert set(RENAMED.values()) <= METRICS.keys()
    assert not RENAMED.keys() & METRICS.keys()


def test_every_metric_has_a_unit():
    for name, text in METRICS.items():
        assert "[" in text, name
        assert name.count("/") >= 1


def test_one_row_per_step(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(3, {"train/reward": 0.5})
        with pytest.raises(AssertionError, match="step 3 after step 3"):
            log.write(3, {"train/reward": 0.5})
    with (
        RunLog(tmp_path) as log,
        pytest.raises(AssertionError, match="step 2 after step 3"),
    ):
        log.write(2, {"train/reward": 0.5})  # reopened: the last step comes from the file


def test_closed_log_is_refused(tmp_path):
    log = RunLog(tmp_path)
    with log:
        pass
    with pytest.raises(AssertionError, match="with block"):
        log.write(1, {})


def test_resume_after_kill_in_the_middle_of_a_line(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/reward": step / 10})
            log.write_sample({"step": step, "response": "x"})
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"step": 4, "trai')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    with (
        pytest.raises(UsageError, match=r"metrics\.jsonl.*half-written"),
        RunLog(tmp_path),
    ):
        pass
    truncate_after(tmp_path, 2)
    with RunLog(tmp_path) as log:
        log.write(3, {"train/reward": 0.9})
    assert [(row["step"], row["train/reward"]) for row in read_metrics(tmp_path)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [1, 2]
    assert not list(tmp_path.glob("*.tmp"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_truncate_after_survives_a_cut_at_any_byte(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    with RunLog(folder) as log:
        for step in range(1, 5):
            log.write(step, {"train/reward": step / 7, "mismatch/k3": math.nan})
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    rows = read_metrics(folder)
    cut = data.draw(st.integers(0, len(whole)))
    keep = data.draw(st.integers(0, 5))
    path.write_bytes(whole[:cut])
    truncate_after(folder, keep)
    complete = whole[:cut].count(b"}")  # a line without its newline is still complete
    assert read_metrics(folder) == rows[: min(complete, keep)]
    assert whole.startswith(path.read_bytes())


def test_truncate_is_atomic(tmp_path, monkeypatch):
    with RunLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5})
        log.write(2, {"train/reward": 0.5})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate_after(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_truncate_of_a_run_without_files(tmp_path):
    truncate_after(tmp_path, 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad", [b"{not json}\n", b"[1, 2]\n", b'{"train/reward": 1}\n', b"\xff\xfe\n", b"\n"]
)
def test_corrupt_line_in_the_middle(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bad + b'{"step": 3}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(UsageError, match=r"metrics\.jsonl: no such file"):
        read_metrics(tmp_path)
