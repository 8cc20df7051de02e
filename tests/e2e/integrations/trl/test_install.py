"""The wheel of this tree beside TRL: nothing that TRL uses is changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.trl, pytest.mark.timeout(600)]
VERSION = "999.0"  # newer than the onepolicy that the borrowed packages hold


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel of a copy of this tree, under a version of its own."""
    pytest.importorskip("hatchling", reason="builds the wheel")
    folder = tmp_path_factory.mktemp("tree")
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "pyproject.toml").read_text()
    text, changed = re.subn(r'(?m)^version = ".*"$', f'version = "{VERSION}"', text)
    assert changed == 1
    (folder / "pyproject.toml").write_text(text)
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=folder)
    (built,) = (folder / "dist").iterdir()
    return built


def run(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_installing_it_changes_no_package_of_trl(wheel, tmp_path):
    venv.create(tmp_path / "beside", with_pip=False)
    python = str(tmp_path / "beside" / "bin" / "python")
    variables = {"base": str(tmp_path / "beside"), "platbase": str(tmp_path / "beside")}
    folder = Path(sysconfig.get_path("purelib", "venv", variables))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (folder / "borrowed.pth").write_text("\n".join(packages))
    before = run("-m", "pip", "--python", python, "list", "--format", "freeze").split()
    assert any(line.startswith("trl==1.16") for line in before)
    # Without an index, pip could not replace anything even if a requirement asked for it.
    run("-m", "pip", "--python", python, "install", "--no-index", str(wheel))
    after = run("-m", "pip", "--python", python, "list", "--format", "freeze").split()
    others = [line for line in before if not line.startswith("onepolicy==")]
    assert [line for line in after if not line.startswith("onepolicy==")] == others
    assert f"onepolicy=={VERSION}" in after
