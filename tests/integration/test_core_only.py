"""The library in an environment of the core dependencies and nothing else."""

import os
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.paths import ROOT

pytestmark = pytest.mark.process
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

CHECK = """
import importlib.util, sys
import onepolicy
assert "torch" not in sys.modules
installed = [name for name in {extras} if importlib.util.find_spec(name)]
assert not installed, installed
exec(compile({example!r}, "example", "exec"), {{}})
rooms = ("onepolicy.report", "onepolicy.envs", "onepolicy.rollout")
outside = [m for m in sys.modules if m.startswith(rooms)]
assert not outside, outside
"""


def closure(requirements: list[str]) -> set[str]:
    """Return the names of all distributions that these need, without any extra."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found.add(requirement.name)
        waiting += [Requirement(line) for line in distribution(requirement.name).requires or []]
    return found


@pytest.fixture(scope="module")
def core_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a virtual environment that links only the core's dependencies, as they are installed
    here."""
    folder = tmp_path_factory.mktemp("core") / "venv"
    venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "onepolicy").symlink_to(ROOT / "src" / "onepolicy")
    for name in closure(PROJECT["dependencies"]):
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or []} - {"..", "__pycache__"}
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(installed.locate_file(top))))
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    command = [str(python), *map(str, words)]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)


@pytest.mark.full
def test_the_library_needs_the_core_only(core_python: Path, tmp_path: Path) -> None:
    """The first example binds, records, replays, measures and reweights."""
    groups = PROJECT["optional-dependencies"].values()
    extras = {Requirement(line).name.replace("-", "_") for group in groups for line in group} - {
        "onepolicy",
        *(Requirement(line).name for line in PROJECT["dependencies"]),  # in the extra train too
    }
    assert {"plotly", "ray", "vllm", "tomlkit"} <= extras
    brought = {name.replace("-", "_") for name in closure(PROJECT["dependencies"])} & extras
    assert brought <= {"httpx2", "jinja2"}  # huggingface_hub 2 and torch need them
    extras -= brought
    example = (ROOT / "examples" / "record_and_replay.py").read_text()
    done = run(core_python, tmp_path, "-c", CHECK.format(extras=sorted(extras), example=example))
    assert done.returncode == 0, done.stderr
    assert "k3 with replay" in done.stdout
    assert str(core_python) != sys.executable


def test_a_command_of_the_trainer_names_the_missing_extra(
    core_python: Path, tmp_path: Path
) -> None:
    recipe = ROOT / "recipes" / "quickstart.toml"
    done = run(core_python, tmp_path, "-m", "onepolicy", "config", recipe)
    assert done.returncode == 2, done.stderr
    needs = "this command needs tomlkit>=0.13 (not installed); pip install 'onepolicy[train]'"
    assert needs in done.stderr
