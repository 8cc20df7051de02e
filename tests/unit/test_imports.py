"""Imports go one way, and the config loads no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "onepolicy"

# A folder may import itself and any folder of a lower rank; siblings (same rank) meet only in loop/.
RANK = {
    "__main__": 10,
    "cli": 9,
    "cluster": 8,
    "loop": 7,
    "audit": 7,
    "plan": 7,
    "report": 6,
    "rollout": 6,
    "train": 6,
    "envs": 6,
    "sync": 5,
    "invariant": 5,
    "replay": 4,
    "models": 4,
    "measure": 3,
    "correct": 3,
    "objective": 3,
    "interfaces": 2,
    "layout": 2,
    "types": 1,
    "jsonl": 1,
    "config": 0,
    "no_statistics": 0,
}
ONLY_TORCH = {"measure", "correct", "objective"}
LIGHT = {"torch", "numpy", "pydantic", "onepolicy"} | set(sys.stdlib_module_names)


def imports(path: Path) -> list[str]:
    """Every module a file imports, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def folder_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path):
    own = folder_of(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "onepolicy" or len(parts) == 1 or parts[1].startswith("__"):
            continue
        other = parts[1]
        assert other == own or RANK[other] < RANK[own], f"{own} must not import {other} ({module})"


@pytest.mark.parametrize("path", [p for p in FILES if folder_of(p) in ONLY_TORCH], ids=lambda p: p.name)
def test_math_needs_torch_only(path):
    heavy = {module.split(".")[0] for module in imports(path)} - LIGHT
    assert not heavy


@pytest.mark.parametrize(("package", "folder"), [("vllm", "vllm"), ("ray", "cluster")])
def test_is_imported_in_one_folder_only(package, folder):
    users = {path.parent.name for path in FILES for module in imports(path) if module.split(".")[0] == package}
    assert users == {folder}


def test_direction_test_sees_a_wrong_import(tmp_path):
    (tmp_path / "bad.py").write_text("def f():\n    from onepolicy.loop import step\n")
    assert imports(tmp_path / "bad.py") == ["onepolicy.run.step"]
    assert RANK["loop"] > RANK["measure"]


@pytest.mark.parametrize("code", ["import onepolicy", "import onepolicy.config", "import onepolicy.cli"])
def test_loads_no_torch(code):
    check = f"{code}; import sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_public_names_resolve():
    import onepolicy

    for name in onepolicy.__all__:
        assert getattr(onepolicy, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = onepolicy.no_such_name
