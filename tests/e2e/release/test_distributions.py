"""Wheel and sdist: what is in them, and that the wheel works in a venv that has nothing else."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# files that are read at run time, beside the modules
DATA = ("py.typed", "report/templates/page.html", "plan/models/DeepSeek-V3.json")

pytestmark = [pytest.mark.release, pytest.mark.process]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the sdist, and the wheel that is built from the unpacked sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_the_sdist_has_the_sources_and_nothing_else(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        *("src", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"),
        *("pyproject.toml", "PKG-INFO", ".gitignore"),
    }
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)


def test_the_wheel_has_every_module_and_its_data(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    package = ROOT / "src" / "onepolicy"
    modules = {f"onepolicy/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert modules | {f"onepolicy/{name}" for name in DATA} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"onepolicy", f"onepolicy-{VERSION}.dist-info"}


def test_the_wheel_says_what_it_needs_and_what_may_be_done_with_it(built):
    with zipfile.ZipFile(built[1]) as archive:
        folder = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(folder).decode()
        assert folder.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    assert "License-Expression: Apache-2.0" in text
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.MULTILINE)
    assert sorted(needed) == ["numpy", "pydantic", "rich", "safetensors", "torch", "transformers"]


def installed_alone(wheel, folder):
    """Install the wheel in a venv that has nothing else and return the venv's python."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    return python


def test_it_imports_where_nothing_else_is_installed(built, tmp_path):
    """Without torch the package loads, and its command says by name what is missing."""
    python = installed_alone(built[1], tmp_path)
    code = "import onepolicy; print(onepolicy.__version__, len(onepolicy.__all__))"
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split()[0] == VERSION
    command = [str(tmp_path / "bin" / "onepolicy"), "measure", "--tiny"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "No module named" in failed.stderr or "pip install" in failed.stderr


def test_it_replays_beside_an_installed_torch(built, tmp_path):
    """The README's first example, run by the installed wheel; torch is that of the tests' venv."""
    lender = ROOT / ".venv" / "bin" / "python"
    if not lender.exists():
        pytest.skip("no .venv with torch; make test makes it")
    python = installed_alone(built[1], tmp_path)
    [site] = tmp_path.glob("lib/python*/site-packages")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    lent = subprocess.run([lender, "-c", where], capture_output=True, text=True, check=True)
    (site / "lent.pth").write_text(lent.stdout)
    code = f"""
import runpy, onepolicy
assert onepolicy.__file__.startswith({str(site)!r}), onepolicy.__file__
runpy.run_path({str(ROOT / "examples" / "record_and_replay.py")!r}, run_name="__main__")
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    shown = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert shown.returncode == 0, shown.stderr
    without, replayed = map(float, re.findall(r"k3 [\w ]+: ([\d.e-]+)", shown.stdout))
    assert 0 < replayed < without
