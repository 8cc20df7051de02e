"""Installed beside a trainer, the library moves nothing that the trainer pins."""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = pytest.mark.process
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OLDEST = {
    "torch": "2.6.0",
    "transformers": "4.51.3",
    "numpy": "1.26.4",
    "pydantic": "2.10.6",
    "safetensors": "0.5.3",
    "rich": "13.7.1",
}
"""What a trainer of the spring of 2025 has installed."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a venv that has the metadata of these versions, which is all that pip looks at."""
    folder = tmp_path_factory.mktemp("trainer") / "venv"
    venv.create(folder, with_pip=False)
    [site] = folder.glob("lib/python*/site-packages")
    for name, version in OLDEST.items():
        metadata = site / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / "bin" / "python"


def dry_run(python: Path, requirements: list[str]) -> "subprocess.CompletedProcess[str]":
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    return subprocess.run(
        [*pip, "--dry-run", "--no-index", *requirements], capture_output=True, text=True
    )


def test_the_library_is_satisfied_with_what_a_trainer_has(trainer: Path) -> None:
    done = dry_run(trainer, PROJECT["dependencies"])
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout
    assert done.stdout.count("Requirement already satisfied") == len(PROJECT["dependencies"])


@pytest.mark.full
def test_the_extra_train_is_not(trainer: Path) -> None:
    done = dry_run(trainer, PROJECT["optional-dependencies"]["train"])
    assert done.returncode != 0
    assert "satisfies the requirement transformers<6,>=5.19" in done.stderr
