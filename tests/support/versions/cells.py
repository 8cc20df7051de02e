"""Old and new versions of torch and transformers: a venv each, the library's tests in it, a page.

python -m support.versions.cells make            # every cell's venv
python -m support.versions.cells run [NAME ...]  # its tests; writes results/NAME.json
python -m support.versions.cells quick [NAME ..] # the fast tests; writes it too
python -m support.versions.cells fast            # a few tests in the cells marked fast
python -m support.versions.cells page            # docs/reference/versions.md
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from support.paths import ROOT
from support.versions.page import write

FOLDER = Path(__file__).parent
VENVS = ROOT / ".venv-versions"
TABLE = tomllib.loads((FOLDER / "cells.toml").read_text(encoding="utf-8"))
CELLS: dict[str, dict[str, Any]] = TABLE["cells"]
FAST = [name for name, cell in CELLS.items() if cell.get("fast")]


def make(name: str) -> Path:
    """Make a cell's venv unless it is there. Return its Python."""
    cell = CELLS[name]
    packages, others = cell["packages"], cell.get("others", [])
    folder = VENVS / name
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join([*packages, *others])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    interpreter = interpreter_of(cell.get("python"))
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    if "python" not in cell:
        [site] = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-cache-dir"]
    # An extra names packages of its own: those of cuda-toolkit are wanted, torch's are not.
    for package in packages:
        alone = [] if "[" in package else ["--no-deps"]
        subprocess.run([*pip, *alone, package], check=True)
    if others:
        subprocess.run([*pip, "--no-warn-conflicts", *others], check=True)
    stamp.write_text(wanted)
    return python


def interpreter_of(release: str | None) -> str:
    """Return a Python of this release, `3.12`: this one, one on the PATH, or one of pyenv.

    Raises SystemExit if there is none.
    """
    if release is None or release == "{}.{}".format(*sys.version_info):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(pyenv.glob(f"versions/{release}.*/bin/python"))
    on_path = shutil.which(f"python{release}")
    for candidate in [*map(str, found), *filter(None, [on_path])]:
        if subprocess.run([candidate, "-c", "import venv"], capture_output=True).returncode == 0:
            return candidate
    raise SystemExit(f"no Python {release} on the PATH or in pyenv; install one")


def run(name: str, kind: str, *, write: bool) -> int:
    """Run these tests of cells.toml in a cell. Return pytest's exit status."""
    results = []
    if write:
        results = ["--results", FOLDER / "results" / f"{name}.json"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("CI", None)  # skips are counted, and are the point
    print(f"{name}:", flush=True)
    command = [make(name), "-m", "pytest", "-p", "support.versions.plugin", "--tests", kind]
    options = ["-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore", "--tb=short", *results]
    return subprocess.run(
        [*command, *options, *TABLE["tests"][kind]], cwd=ROOT, env=environment
    ).returncode


def main(words: list[str]) -> int:
    """Run one of the commands of this file's docstring. Return the exit status."""
    command, *names = words
    if command == "make":
        for name in names or CELLS:
            make(name)
        return 0
    if command == "fast":
        return max(run(name, "fast", write=False) for name in FAST)
    if command == "run":
        return max(run(name, CELLS[name]["tests"], write=True) for name in names or CELLS)
    if command == "quick":
        return max(run(name, "fast", write=True) for name in names or CELLS)
    assert command == "page", command
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
