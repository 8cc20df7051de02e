"""Files of a run that are missing, damaged or of another shape: one error names the file, and no
report is made."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from onepolicy.config import UsageError
from onepolicy.report.html import write_report
from onepolicy.report.run import load_run
from support.report_run import make_fixture_run, write_probe


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a small run that a test may damage."""
    return make_fixture_run(tmp_path / "run", steps=12, tokens=120)


@pytest.mark.parametrize("name", ["config.json", "run.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "corrupt", "wrong type", "empty"])
def test_required_file(copy, name, damage):
    path = copy / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_text({"corrupt": "{]\n{}\n", "wrong type": "[1]\n[2]\n", "empty": ""}[damage])
    with pytest.raises(UsageError, match=re.escape(str(path))):
        write_report(copy)
    assert not (copy / "report.html").exists()


def test_no_such_folder(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such run folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("samples.jsonl", '{"prompt": "x"}', r"samples\.jsonl:2: no integer `step`"),
        ("metrics.jsonl", '{"train/reward": 1}', r"metrics\.jsonl:2: no integer `step`"),
        ("metrics.jsonl", '{"step": true}', r"metrics\.jsonl:2: no integer `step`"),
        (
            "metrics.jsonl",
            '{"step": 2, "train/reward": "1"}',
            r"metrics\.jsonl:2: train/reward is '1', not a number",
        ),
        ("metrics.jsonl", 100_000 * "[", r"metrics\.jsonl:2: not a JSON object"),
    ],
    ids=lambda x: x[:30],
)
def test_row_of_another_shape(copy, name, line, message):
    (copy / name).write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UsageError, match=message):
        write_report(copy)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ({}, r"summary\.json: lacks steps"),
        ({"steps": "12"}, r"summary\.json: steps is '12', but should be a valid integer"),
        (
            {"steps": 12, "eval_best": 0.5},
            r"summary\.json: eval_best is 0\.5, but should be a valid dictionary",
        ),
        (
            {"steps": 12, "parent": {"run": "x"}},
            r"summary\.json: lacks parent\.step; delete it",
        ),
    ],
)
def test_summary_without_its_parts(copy, summary, message):
    (copy / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match=message):
        write_report(copy)


def test_half_a_surrogate_pair_in_a_sample(copy):
    (copy / "samples.jsonl").write_text('{"step": 1, "response": "a\\ud800b"}\n')
    assert "a\\ud800b" in write_report(copy).read_text(encoding="utf-8")


def test_summary_of_another_shape(copy):
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(
        json.dumps(summary | {"mismatch": {"mismatch/k3": {"mean": 1}}})
    )
    with pytest.raises(
        UsageError,
        match=r"summary\.json: mismatch\.mismatch/k3 is .*, but should be a valid number",
    ):
        write_report(copy)


@pytest.mark.parametrize("damage", ["garbage", "no tensor", "nan", "shape"])
def test_corrupt_probe(copy, damage):
    path = copy / "probes" / "step_00010.safetensors"
    tensors = load_file(path)
    if damage == "garbage":
        path.write_bytes(b"not safetensors")
    else:
        tensors["logp_trainer"][0] = math.nan if damage == "nan" else -1.0
        if damage == "shape":
            tensors["logp_trainer"] = tensors["logp_trainer"][1:]
        if damage == "no tensor":
            del tensors["logp_trainer"]
        save_file(tensors, path)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        write_report(copy)


def test_the_last_probe_is_shown(copy):
    write_probe(
        copy / "probes" / "step_00002.safetensors", tokens=40, replay=True, moe=True, seed=1
    )
    write_probe(
        copy / "probes" / "step_100000.safetensors", tokens=41, replay=True, moe=True, seed=1
    )
    probe = load_run(copy).probe
    assert probe is not None
    assert probe.step == 100000


def test_plotly_not_installed(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"onepolicy\[report\].*log\.report=false"):
        write_report(copy)
    assert not list(copy.glob("report.html*"))
