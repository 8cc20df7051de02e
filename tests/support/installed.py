"""The wheel of this tree, installed beside the packages of the running venv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from support.paths import ROOT

VERSION = "999.0"  # newer than the onepolicy that the borrowed packages hold


def build_wheel(folder: Path) -> Path:
    """Return the wheel of a copy of this tree, under a version of its own."""
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "pyproject.toml").read_text()
    text, changed = re.subn(r'(?m)^version = ".*"$', f'version = "{VERSION}"', text)
    assert changed == 1
    (folder / "pyproject.toml").write_text(text)
    _run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=folder)
    (built,) = (folder / "dist").iterdir()
    return built


def packages_before_and_after(wheel: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Install the wheel in a new venv that borrows the packages of this one.

    Return name==version of all its packages before and after, in pip's order.
    """
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    variables = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", variables))
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (own / "borrowed.pth").write_text("\n".join(borrowed))
    before = _run("-m", "pip", "--python", python, "list", "--format", "freeze").split()
    # Without an index, pip could not replace anything even if a requirement asked for it.
    _run("-m", "pip", "--python", python, "install", "--no-index", str(wheel))
    after = _run("-m", "pip", "--python", python, "list", "--format", "freeze").split()
    return before, after


def without_ours(packages: list[str]) -> list[str]:
    return [line for line in packages if not line.startswith("onepolicy==")]


def _run(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
