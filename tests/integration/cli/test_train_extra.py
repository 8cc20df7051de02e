"""Commands that train say what of the extra `train` is missing or too old, before they load
torch."""

import tomllib

import pytest

from onepolicy.cli.common import TRAIN_EXTRA, check_train_extra
from onepolicy.config import UsageError
from support.cli_commands import run_commands
from support.paths import ROOT

COMMANDS = [
    "train R model.path=model out=new",
    "eval R model.path=model",
    "measure ./model",
    "make-policy --out policy",
    "export model --out policy",
    "plan R --cluster 1xcpu",
    "engine check tiny",
    "engine serve tiny",
]
NEEDS = "this command needs torch>=2.11 (2.6.0 is installed); transformers>=5.19,<6 (4.57.6 is"


def pretend(folder, **versions):
    """Write the metadata of other versions into a folder that Python looks into first."""
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_requirements_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert list(TRAIN_EXTRA) == project["optional-dependencies"]["train"]


@pytest.mark.process
def test_a_command_of_the_trainer_names_versions_and_fix(tmp_path, subtests):
    """A trainer's venv may still read our recipes and print them."""
    pretend(tmp_path, torch="2.6.0", transformers="4.57.6")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    recipe = str(ROOT / "recipes" / "quickstart.toml")
    commands = [words.replace(" R", f" {recipe}").split() for words in [*COMMANDS, "config R"]]
    *refused, config = run_commands(commands, tmp_path, first_on_path=[tmp_path])
    for words, found in zip(COMMANDS, refused, strict=True):
        with subtests.test(words):
            assert (found.status, found.loaded) == (2, []), found
            assert NEEDS in found.err
            assert "pip install 'onepolicy[train]'" in found.err
    assert (config.status, config.loaded) == (0, []), config
    assert "[rollout" in config.out


def test_a_missing_package_is_named():
    with pytest.raises(UsageError, match=r"no-such-package>=1 \(not installed\); pip install"):
        check_train_extra(["no-such-package>=1"])


def test_releases_are_compared_as_numbers(monkeypatch, subtests):
    for installed in ("5.19.0", "5.19", "5.19.0a0+gitabc", "5.23.0"):  # the third is a vendor's
        monkeypatch.setattr("onepolicy.cli.common.version", lambda _, it=installed: it)
        with subtests.test(installed=installed):
            check_train_extra(["transformers>=5.19,<6"])
    for installed in ("5.18.3", "6.0.0", "10.1"):
        monkeypatch.setattr("onepolicy.cli.common.version", lambda _, it=installed: it)
        with (
            subtests.test(installed=installed),
            pytest.raises(UsageError, match=r"transformers>=5\.19,<6 .* is installed"),
        ):
            check_train_extra(["transformers>=5.19,<6"])
