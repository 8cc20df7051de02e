"""The GitHub workflows call the Makefile's targets, and nothing else runs the tests."""

import importlib.metadata
import os
import re
import subprocess
import tomllib

import pytest
import yaml

from support.paths import ROOT

WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
PHASES = tomllib.loads((ROOT / "tests" / "phases.toml").read_text(encoding="utf-8"))
TARGETS |= {f"test-{name}" for name in PHASES}
TEST_TOOLS = re.compile(r"\b(pytest|ruff|mypy|benchmarks/)")


def commands(path):
    """Return the shell commands of a workflow's steps, and of the scripts in .ci that they run."""
    steps = [
        step
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job["steps"]
    ]
    found = "\n".join(step["run"] for step in steps if "run" in step)
    for script in re.findall(r"^\.ci/\w+", found, re.MULTILINE):
        found += "\n" + (ROOT / script).read_text(encoding="utf-8")
    return found


def targets(text):
    """Return the words behind each `make`, flags and variables left out."""
    calls = re.findall(r"(?:^|&& |=true )make ([^&|;#\n]+)", text, re.MULTILINE)
    return [word for call in calls for word in call.split() if re.fullmatch(r"[a-z][a-z-]*", word)]


def test_there_is_one_for_each_occasion():
    """Every push, every night, by hand on a GPU, a release."""
    triggers = {
        name: set(yaml.safe_load(path.read_text(encoding="utf-8"))[True])  # "on" is true in YAML
        for name, path in WORKFLOWS.items()
    }
    assert triggers == {
        "check": {"push", "pull_request"},
        "gpu": {"workflow_dispatch"},
        "nightly": {"schedule", "workflow_dispatch"},
        "release": {"push"},
    }


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_target_that_it_calls_exists(name):
    called = targets(commands(WORKFLOWS[name]))
    assert called
    assert set(called) <= TARGETS


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_runs_tests_and_benchmarks_through_the_makefile_only(name):
    assert not TEST_TOOLS.search(commands(WORKFLOWS[name]))


def test_actions_are_named_by_commit():
    """A tag or a branch may be moved. The version stands behind the commit, for people."""
    used = re.findall(
        r"uses: *(.*)", "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS.values())
    )
    assert used
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert [each for each in used if not pinned.fullmatch(each)] == []


SHELL = """#!/bin/sh
echo "$PIP_CONSTRAINT|$PIP_BUILD_CONSTRAINT|$2"
"""


def pip_calls(tmp_path):
    """Return the constraints that make gives each call of pip, and the call, without running it."""
    shell = tmp_path / "shell"
    shell.write_text(SHELL)
    shell.chmod(0o700)
    stamps = re.findall(r"^(\$\(\w+\)/\.\w+):", MAKEFILE, re.MULTILINE)
    paths = dict(re.findall(r"^(\w+) := (\S+)$", MAKEFILE, re.MULTILINE))
    stamps = [re.sub(r"\$\((\w+)\)", lambda name: paths[name[1]], stamp) for stamp in stamps]
    ran = subprocess.run(
        ["make", "-s", "-B", f"SHELL={shell}", *stamps],
        cwd=ROOT,
        env=os.environ | {"PIP_CONSTRAINT": "", "PIP_BUILD_CONSTRAINT": ""},
        text=True,
        capture_output=True,
        check=True,
    )
    return [line.split("|", 2) for line in ran.stdout.splitlines() if "/pip install " in line]


def pins(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))


@pytest.mark.process
def test_builds_are_bound_by_the_pins(tmp_path):
    """`-c` does not reach the environments that pip builds sdists and the package in."""
    calls = pip_calls(tmp_path)
    assert len(calls) == MAKEFILE.count("/pip install ")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for first, second, call in calls:
        assert first == second != "", call
        assert {*wanted, "editables", "setuptools", "trove-classifiers", "wheel"} <= {*pins(first)}
        assert pins(first).items() <= pins("constraints.txt").items()


def test_what_is_installed_has_its_version_in_the_pins():
    """The CUDA packages of torch depend on the machine, and so does its build (2.13.0+cpu)."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {tuple(line.split("==")) for line in lines if "==" in line}
    pinned = {(plain_name(name), version) for name, version in pinned}
    loose = re.compile("onepolicy|pip|setuptools|triton|nvidia-.*|cuda-.*")
    found = {
        (plain_name(each.name), each.version.partition("+")[0])
        for each in importlib.metadata.distributions()
    }
    assert {each for each in found - pinned if not loose.fullmatch(each[0])} == set()


def plain_name(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_together_they_call_every_test_of_the_makefile():
    called = {target for path in WORKFLOWS.values() for target in targets(commands(path))}
    assert {"check", "test", "test-all", "gpu-pack"} <= called


def test_the_manual_one_runs_on_a_gpu_of_ones_own_and_keeps_what_it_found():
    job = yaml.safe_load(WORKFLOWS["gpu"].read_text(encoding="utf-8"))["jobs"]["gpu"]
    assert job["runs-on"] == ["self-hosted", "gpu"]
    runs = [step["run"].partition(" #")[0] for step in job["steps"] if "run" in step]
    queue = "python3 .gpu-pack/run.py --seconds ${{ inputs.seconds }}"
    assert runs == ["nvidia-smi", "make gpu-pack", queue]
    kept = job["steps"][-1]
    assert kept["if"] == "always()"
    assert kept["with"]["path"] in job["env"]["OUT"]  # what benchmarks/gpu/run.py writes to
