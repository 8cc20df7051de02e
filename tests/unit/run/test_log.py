"""Metric sinks: the contents of the files, the rest after a kill, and the rows that a resume
keeps."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import UsageError, resolve
from onepolicy.run.log import METRICS, RunLog, is_known, read_metrics, truncate_after
from onepolicy.run.log_digest import digest_log, find_damage
from onepolicy.run.run_folder import write_config


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_samples(tmp_path):
    more = {"eval/avg@16": 0.25, "counterfactual/mismatch/f1.25": 0.0}
    sample = {"step": 2, "response": "1+1=\u2028\ud800 \u00e9", "mean_logp_rollout": math.nan}
    first = {"step": 1, "train/reward": 0.5, "mismatch/k3": None, "mismatch/chi2": None}
    with RunLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5, "mismatch/k3": math.nan, "mismatch/chi2": math.inf})
        assert read_metrics(tmp_path) == [first]  # in the file during the run
        log.write(2, {"train/reward": 1} | more)
        log.write_sample(sample)
    assert lines(tmp_path / "metrics.jsonl") == [first, {"step": 2, "train/reward": 1.0} | more]
    assert read_metrics(tmp_path) == lines(tmp_path / "metrics.jsonl")
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert "\u00e9".encode() in raw  # readable, not escaped
    assert json.loads(raw) == sample | {"mean_logp_rollout": None}


def test_unknown_name_is_refused_and_nothing_is_written(tmp_path):
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="train/rewards"):
        log.write(1, {"train/reward": 0.5, "train/rewards": 0.5})
    assert read_metrics(tmp_path) == []
    assert is_known("eval/pass@4")
    assert not any(map(is_known, ("eval/pass@", "eval/pass@k4", "counterfactual/train/reward")))


def test_every_metric_has_a_unit():
    for name, text in METRICS.items():
        assert "[" in text, name  # its unit
        assert name.count("/") >= 1


def test_one_row_per_step(tmp_path):
    with RunLog(tmp_path) as log:
        log.write(3, {"train/reward": 0.5})
        with pytest.raises(AssertionError, match="step 3 after step 3"):
            log.write(3, {"train/reward": 0.5})
    with RunLog(tmp_path) as log, pytest.raises(AssertionError, match="step 2 after step 3"):
        log.write(2, {"train/reward": 0.5})  # reopened: the last step comes from the file
    with pytest.raises(AssertionError, match="with block"):
        log.write(4, {})


def test_resume_after_kill_in_the_middle_of_a_line(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, {"train/reward": step / 10})
            log.write_sample({"step": step, "response": "x"})
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / name, "ab") as file:
            file.write(b'{"step": 4, "trai')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    with pytest.raises(UsageError, match=r"metrics\.jsonl.*half-written"), RunLog(tmp_path):
        pass
    truncate_after(tmp_path, 2)
    with RunLog(tmp_path) as log:
        log.write(3, {"train/reward": 0.9})
    rows = [(row["step"], row["train/reward"]) for row in read_metrics(tmp_path)]
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.9)]
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
    truncate_after(tmp_path, 3)  # a run without files
    assert not list(tmp_path.iterdir())
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


def test_what_a_resume_rewrites_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Settings that did not change are not written again."""
    with RunLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5})
    config = resolve({"out": "x", "steps": 3, "model": {"path": "m"}, "task": {"kind": "chain"}})
    synced, replaced, replace = set(), [], os.replace

    def renamed(source, target):
        replaced.append((target.name, os.stat(source).st_ino in synced))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda file: synced.add(os.fstat(file).st_ino))
    monkeypatch.setattr(os, "replace", renamed)
    truncate_after(tmp_path, 0)
    write_config(tmp_path, config)
    write_config(tmp_path, config)
    write_config(tmp_path, config.model_copy(update={"steps": 4}))
    names = ("metrics.jsonl", "samples.jsonl", "config.json", "config.json")
    assert replaced == [(name, True) for name in names]


def flipped(data):
    return data.replace(b"0.5", b"0.7", 1)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_rows_that_a_checkpoint_saw_and_that_are_lost_or_changed_are_found(tmp_path, name):
    assert find_damage(tmp_path, digest_log(tmp_path)) == []  # before the first row
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3):
            if step == 3:
                saved = digest_log(tmp_path)
            log.write(step, {"train/reward": 0.5})
            log.write_sample({"step": step, "reward": 0.5})
    path = tmp_path / name
    whole = path.read_bytes()
    assert find_damage(tmp_path, saved) == []
    for damaged in (whole[: len(whole) // 2], b"", flipped(whole), whole[1:]):
        path.write_bytes(damaged)
        assert find_damage(tmp_path, saved) == [path]
    path.unlink()
    assert find_damage(tmp_path, saved) == [path]
    os.mkfifo(path)  # would wait for a writer
    assert find_damage(tmp_path, saved) == [path]
    path.unlink()
    path.write_bytes(whole)
    truncate_after(tmp_path, 2)
    assert digest_log(tmp_path) == saved  # so the next resume finds nothing either
    assert find_damage(tmp_path, {}) == []  # of a checkpoint from before there were digests


def test_a_missing_file_and_a_corrupt_line_in_the_middle(tmp_path, subtests):
    with pytest.raises(UsageError, match=r"metrics\.jsonl: no such file"):
        read_metrics(tmp_path)
    values = (b"true", b"NaN", b"[]")
    bad_lines = [b'{"step": 2, "train/reward": ' + value + b"}" for value in values]
    bad_lines += [b"{not json}", b"[1, 2]", b'{"train/reward": 1}', b"\xff\xfe", b""]
    for bad in (*bad_lines, b'{"step": 1}', b'{"step": -1}'):
        (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
        with subtests.test(bad=bad), pytest.raises(UsageError, match=r"metrics\.jsonl:2"):
            read_metrics(tmp_path)


def test_a_strangers_key_forges_no_line_of_an_error(tmp_path):
    row = json.dumps({"step": 1, "a\nonepolicy: all is well" + "x" * 70_000: "no number"})
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl:1: a\\nonepolicy: all is well") as said:
        read_metrics(tmp_path)
    assert str(said.value).isprintable()
    assert len(str(said.value)) < 600
