"""Commands that train say what of the extra `train` is missing or too old, before they load
torch."""

import os
import subprocess
import sys
import tomllib

import pytest

from onepolicy.cli.train_extra import TRAIN_EXTRA, check_train_extra
from onepolicy.config import UsageError
from support.paths import ROOT

QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")


def pretend(folder, **versions):
    """Write the metadata of other versions into a folder that Python looks into first."""
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def run(folder, *words):
    code = """
import sys
from onepolicy.cli import main
try: status = main()
except SystemExit as end: status = end.code
assert not {"torch", "transformers"} & set(sys.modules), "loaded"
sys.exit(status)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_the_requirements_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(TRAIN_EXTRA) == project["optional-dependencies"]["train"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", QUICKSTART, "model.path=model", "out=new"],
        ["eval", QUICKSTART, "model.path=model"],
        ["measure", "./model"],
        ["make-policy", "--out", "policy"],
        ["export", "model", "--out", "policy"],
        ["plan", QUICKSTART, "--cluster", "1xcpu"],
        ["engine", "check", "tiny"],
        ["engine", "serve", "tiny"],
    ],
    ids=lambda words: " ".join(words[:2]).replace(QUICKSTART, "R"),
)
def test_a_command_of_the_trainer_names_versions_and_fix(tmp_path, words):
    pretend(tmp_path, torch="2.6.0", transformers="4.57.6")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    done = run(tmp_path, *words)
    assert done.returncode == 2, done.stderr
    needs = "this command needs torch>=2.13 (2.6.0 is installed); transformers>=5.19,<6 (4.57.6 is"
    assert needs in done.stderr
    assert "pip install 'onepolicy[train]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_is_named():
    with pytest.raises(UsageError, match=r"no-such-package>=1 \(not installed\); pip install"):
        check_train_extra(["no-such-package>=1"])


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        ("5.18.3", False),
        ("5.19.0", True),
        ("5.19", True),
        ("5.19.0a0+gitabc", True),  # a vendor's build of 5.19
        ("5.23.0", True),
        ("6.0.0", False),
        ("10.1", False),
    ],
)
def test_releases_are_compared_as_numbers(monkeypatch, installed, fits):
    monkeypatch.setattr("onepolicy.cli.train_extra.version", lambda _: installed)
    if fits:
        check_train_extra(["transformers>=5.19,<6"])
        return
    with pytest.raises(UsageError, match=r"transformers>=5\.19,<6 .* is installed"):
        check_train_extra(["transformers>=5.19,<6"])


def test_settings_are_read_on_any_version(tmp_path):
    """A trainer's venv may read our recipes and print them."""
    pretend(tmp_path, torch="2.6.0", transformers="4.57.6")
    done = run(tmp_path, "config", QUICKSTART)
    assert done.returncode == 0, done.stderr
    assert "[rollout" in done.stdout
