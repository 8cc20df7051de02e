"""Files of a run that are missing, damaged or of another shape: one error names the file, and no
report is made."""

import json
import math
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from onepolicy.config import UsageError
from onepolicy.config.secrets import without_secrets
from onepolicy.report.run import load_run
from onepolicy.report.run_page import write_report
from support.report_run import make_fixture_run, write_probe


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_fixture_run(tmp_path_factory.mktemp("runs") / "whole", steps=12, tokens=120)


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """Return a run that a test may damage."""
    return shutil.copytree(whole, tmp_path / "run")


@contextmanager
def written(path: Path, data: str | bytes | None):
    """Write other data into a file, or none: remove it. Put back what it held."""
    before = path.read_bytes()
    path.unlink()
    if data is not None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    try:
        yield
    finally:
        path.write_bytes(before)


def refused(folder: Path, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        write_report(folder)


def test_a_link_to_a_file_elsewhere_is_not_shown(copy, tmp_path):
    for name in ("samples.jsonl", "metrics.jsonl"):
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        refused(copy, rf"{name}: a link out of its folder")
        (copy / name).unlink()
        (tmp_path / name).rename(copy / "kept")
        (copy / name).symlink_to("kept")  # inside the folder it is the run's own
        write_report(copy)


DAMAGES = {"missing": None, "corrupt": "{]\n{}\n", "wrong type": "[1]\n[2]\n", "empty": ""}


def test_required_file(copy, subtests):
    for name in ("config.json", "run.json", "summary.json", "metrics.jsonl"):
        for damage, data in DAMAGES.items():
            with subtests.test(name=name, damage=damage), written(copy / name, data):
                refused(copy, re.escape(str(copy / name)))
                assert not (copy / "report.html").exists()


def test_no_such_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such run folder")


ROWS = [
    ("samples.jsonl", '{"prompt": "x"}', "lacks step"),
    ("metrics.jsonl", '{"train/reward": 1}', "lacks step"),
    ("metrics.jsonl", '{"step": true}', "step is True, but should be a valid integer"),
    ("metrics.jsonl", '{"step": 2, "train/reward": "1"}', "train/reward is '1', which no metric"),
    ("metrics.jsonl", 100_000 * "[", "not a JSON object"),
]
SUMMARIES = [
    ({"steps": None}, "lacks steps"),
    ({"steps": "12"}, "steps is '12', .* valid integer"),
    ({"eval_best": 0.5}, r"eval_best is 0\.5, .* valid dictionary"),
    ({"parent": {"run": "x"}}, r"lacks parent\.step; delete it"),
    ({"nothing_learnt": 3}, "nothing_learnt is 3, .* valid dictionary"),
    ({"nothing_learnt": {"learnt": "nothing"}}, r"lacks nothing_learnt\.verdict"),
    ({"mismatch": {"mismatch/k3": {"mean": 1}}}, r"mismatch\.mismatch/k3 is .* valid number"),
]


def test_a_row_or_a_summary_of_another_shape(copy, subtests):
    for name, line, words in ROWS:
        rows = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
        with subtests.test(name, line=line[:30]), written(copy / name, rows):
            refused(copy, f"{name}:2: {words}")
    summary = json.loads((copy / "summary.json").read_text())
    for change, words in SUMMARIES:
        other = {name: value for name, value in (summary | change).items() if value is not None}
        with subtests.test(words), written(copy / "summary.json", json.dumps(other)):
            refused(copy, rf"summary\.json: {words}")


def test_half_a_surrogate_pair_in_a_sample(copy):
    (copy / "samples.jsonl").write_text('{"step": 1, "response": "a\\ud800b"}\n')
    assert "a\\ud800b" in write_report(copy).read_text(encoding="utf-8")


def test_corrupt_probe(copy, subtests):
    path = copy / "probes" / "step_00010.safetensors"
    tensors = load_file(path)
    logp = tensors.pop("logp_trainer")
    with_nan = np.concatenate([[np.float32(math.nan)], logp[1:]])
    damages = {"no tensor": {}, "nan": {"logp_trainer": with_nan}}
    damages["shape"] = {"logp_trainer": logp[1:]}
    data = {name: save(tensors | change) for name, change in damages.items()}
    for damage, wrong in (data | {"garbage": b"not safetensors"}).items():
        with subtests.test(damage), written(path, wrong):
            refused(copy, re.escape(str(path)))
    write_report(copy)


def test_the_last_probe_is_shown(copy):
    for step in ("00002", "100000"):
        path = copy / "probes" / f"step_{step}.safetensors"
        write_probe(path, tokens=40, replay=True, seed=1)
    probe = load_run(copy).probe
    assert probe is not None
    assert set(probe.columns["step"]) == {100000}


def test_plotly_not_installed(copy, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    refused(copy, r"onepolicy\[report\].*log\.report=false")
    assert not list(copy.glob("report.html*"))


@pytest.mark.parametrize("text", ["-", "key", "://", "-key ", "a"])
def test_a_long_text_is_searched_in_one_pass(text):
    """Unbounded names made it quadratic: these took minutes."""
    settings = {"params": {"x": text * 200_000}}
    assert len(without_secrets(settings)["params"]["x"]) > 100_000


def test_a_key_of_a_tasks_settings_is_not_in_the_page(copy):
    """People share the page. config.json keeps the key, which a resume needs."""
    settings = json.loads((copy / "config.json").read_text())
    more = {"X-Api-Key": "sk-LEAKED", "secret_key": "sk-LEAKED", "Authorization": "Bearer hunter2"}
    more |= {"api_keys": ["sk-LEAKED", 3], "url": "https://me:hunter2@host/v1", "tokens": 4}
    more |= {
        "OPENAI_API_KEY_1": "sk-LEAKED",
        "auth": "hunter2",
        "proxy": "http://me:p@/hunter2@host",
    }
    more |= {"GITHUB_PAT": "sk-LEAKED", "headers": ["Authorization: Bearer hunter2", "Accept: *"]}
    more |= {"pairs": [["X-Token", "sk-LEAKED"], {"name": "Cookie", "value": "hunter2"}]}
    more |= {"args": ["serve", "--api-key=sk-LEAKED", "--token", "hunter2", "--token-limit=7"]}
    more |= {
        "db_pass": "hunter2",
        "private_key_pem": "sk-LEAKED",
        "jwt": "sk-LEAKED",
        "max_tokens": 9,
    }
    more |= {"hook": "https://h/?api_key=sk-LEAKED&x=1", "conn": "Server=x;Password=hunter2;y=1"}
    more |= {"line": "sh -c 'agent --api-key sk-LEAKED'", "list": "--password=a,hunter2"}
    more |= {"json": '{"a": 1, "api_key": "sk-LEAKED"}', "tokenizer": "mine"}
    keys = {"env": {"api_key": "sk-LEAKED", "size": 3}, "params": {"PASSWORD": "hunter2"} | more}
    keys |= {"command": ["run", "-H", "Authorization: Bearer hunter2"], "answer_key": "ours"}
    (copy / "config.json").write_text(json.dumps(settings | {"task": keys}))
    page = write_report(copy).read_text(encoding="utf-8")
    assert page.count("hidden") >= 20
    for shown in ("https://hidden@host/v1", "ours", "Accept: *", "mine", "serve"):
        assert shown in page
    assert [each for each in ("sk-LEAKED", "hunter2") if each in page] == []
