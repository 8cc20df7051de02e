"""Imports go one way, and the config loads no torch."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.paths import ROOT
from support.sources import nodes_of

PACKAGE = ROOT / "src" / "onepolicy"

# The house, from the roof down. A room may import itself and rooms further down; rooms of one line
# do not know each other.
FLOORS = """
__main__
cli
measure plan
run
engine_check
launch
build integrations
gateway
audit rollout train envs tiny
report invariant sync
replay models
verdict
divergence correct objective
record
nonfinite
interfaces layout
types
support
console
config files chat_templates tokenizer_trial gym_scores arguments
bounded npy
errors notation telemetry
"""
RANK = {
    room: rank for rank, floor in enumerate(reversed(FLOORS.split("\n"))) for room in floor.split()
}
FACTORY = r"onepolicy(\.\w+)+:\w+"
ONLY_TORCH = {"divergence", "correct", "objective", "verdict"}
LIBRARY = {*ONLY_TORCH, "replay", "record", "support"}
LIGHT = {"torch", "numpy", "pydantic", "onepolicy"} | set(sys.stdlib_module_names)


@cache
def imports(path: Path) -> list[str]:
    """Return every module that a file imports, also inside functions, and by the name of a factory
    in a table."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and re.fullmatch(FACTORY, str(node.value)):
            found.append(node.value.replace(":", "."))
    return found


def folder_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_direction():
    wrong = []
    for path in FILES:
        own = folder_of(path)
        for module in imports(path):
            root, *parts = module.split(".")
            room = (parts or ["__"])[0]
            ours = root == "onepolicy" and not room.startswith("__")
            if ours and room != own and RANK[room] >= RANK[own]:
                wrong.append(f"{path}: {own} must not import {room} ({module})")
    assert not wrong


def test_every_room_has_a_floor():
    assert {folder_of(path) for path in FILES} == set(RANK)


def graph() -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports, also in functions and under
    TYPE_CHECKING."""
    known = {module_of(path): path for path in FILES}
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        inner = imports(path)
        found[name] = {m if m in known else m.rpartition(".")[0] for m in inner} & known.keys() - {
            name
        }
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter(graph()).prepare()  # CycleError names the files


def test_the_circle_test_sees_a_circle():
    found = graph()
    found["onepolicy.types"].add("onepolicy.run.step")
    with pytest.raises(CycleError):
        TopologicalSorter(found).prepare()


def test_math_needs_torch_only():
    math = [path for path in FILES if folder_of(path) in ONLY_TORCH]
    assert math
    heavy = {path: {name.split(".")[0] for name in imports(path)} - LIGHT for path in math}
    assert not {path: names for path, names in heavy.items() if names}


@pytest.mark.parametrize(("package", "folder"), [("vllm", "vllm"), ("ray", "ray")])
def test_is_imported_in_one_folder_only(package, folder):
    """An adapter may import what its trainer is built on: verl's driver is a Ray program."""
    users = {
        path.parent.name
        for path in FILES
        if folder_of(path) != "integrations"
        for module in imports(path)
        if module.split(".")[0] == package
    }
    assert users == {folder}


def test_integrations_stand_on_the_library_only():
    """They run with a trainer's versions of torch and transformers, so nothing of ours that
    trains."""
    used = {
        module.split(".")[1]
        for path in FILES
        if folder_of(path) == "integrations"
        for module in imports(path)
        if module.startswith("onepolicy.")
    }
    allowed = {"integrations", "types", "nonfinite", "console", "config", "files", "npy", "errors"}
    assert used <= allowed | LIBRARY


def test_direction_test_sees_a_wrong_import(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    from onepolicy.run import step\n")
    assert imports(tmp_path / "bad.py") == ["onepolicy.run.step"]
    assert RANK["run"] > RANK["divergence"]


@pytest.mark.process
@pytest.mark.parametrize(
    "code", ["import onepolicy", "import onepolicy.config", "import onepolicy.cli"]
)
def test_loads_no_torch(code):
    check = f"{code}; import sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_no_room_has_the_name_of_a_public_function():
    """`import onepolicy.mismatch` would put the package where `onepolicy.mismatch` the function is
    looked up."""
    import onepolicy

    assert not set(onepolicy.__all__) & set(RANK)
