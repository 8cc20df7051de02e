"""Names of torch and transformers that are not public stand in one file."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from onepolicy import UsageError
from onepolicy.replay import private_names, recompute
from support.paths import ROOT

PACKAGE = ROOT / "src" / "onepolicy"
CORE = (
    *("replay", "correct", "divergence", "objective", "verdict", "audit", "integrations"),
    *("config", "layout.py", "types.py", "interfaces.py", "files.py", "telemetry.py"),
    "__init__.py",
)
"""The library: it runs on versions that the trainer does not."""
OF_PYTHON = {"_getframe", "_replace", "_asdict", "_fields"}
PRIVATE = re.compile(r"\b_[a-zA-Z]\w*")
DEFINED = re.compile(r"(?:def|class) (_[a-zA-Z]\w*)|self\.(_[a-zA-Z]\w*)")
OF_TRAINERS = ("integrations", "record/export")
"""These folders use names of the trainers that they are for."""


def core_files() -> list[Path]:
    files: list[Path] = []
    for name in CORE:
        path = PACKAGE / name
        files += path.rglob("*.py") if path.is_dir() else [path]
    return sorted(files)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def nodes_of(code: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(code)))


@cache
def own_names() -> set[str]:
    """Return every private name that the library itself defines."""
    codes = [path.read_text() for path in core_files()]
    found = {name for code in codes for pair in DEFINED.findall(code) for name in pair}
    for code in codes:
        if has_others(code, found):  # few are parsed, which takes a second for all
            stores = (n for n in nodes_of(code) if isinstance(n, ast.Name))
            found |= {node.id for node in stores if isinstance(node.ctx, ast.Store)}
    return {name for name in found if is_private(name)}


def has_others(code: str, own: set[str]) -> bool:
    return not set(PRIVATE.findall(code)) <= own | OF_PYTHON


def foreign_private_names(code: str, own: set[str]) -> list[str]:
    """Return the private names of other packages that this code reads, sets, imports or looks
    up by a string."""
    found = []
    for node in nodes_of(code):
        if isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("onepolicy"):
            found += [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr") and len(node.args) > 1:
                name = node.args[1]
                found += [name.value] if isinstance(name, ast.Constant) else []
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("torch.", "transform")):
            found += str(node.value).split(".")
    return [name for name in found if is_private(name) and name not in own | OF_PYTHON]


def of_torch_or_transformers(code: str) -> list[str]:
    """Return dotted private names such as torch._C that this code reads."""
    found = []
    for node in nodes_of(code):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if getattr(node, "id", "") in ("torch", "transformers") and any(map(is_private, path)):
            found.append(".".join([node.id, *path]))
    return found


def test_private_names_are_in_one_file() -> None:
    found = {}
    for path in core_files():
        where, code = str(path.relative_to(PACKAGE)), path.read_text()
        if not has_others(code, own_names()):
            continue
        names = of_torch_or_transformers(code)
        if not where.startswith(OF_TRAINERS):
            names += foreign_private_names(code, own_names())
        found |= {where: names} if names else {}
    assert found.keys() == {"replay/private_names.py"}, found


def test_the_test_sees_private_names() -> None:
    code = """
import torch._dynamo
from torch.utils.checkpoint import _one
torch._C._two()
getattr(model, "_three")
name = "torch.distributed._four"
model._five = 1
torch.cat(self._own)
"""
    found = foreign_private_names(code, {"_own"})
    assert set(found) == {"_dynamo", "_one", "_C", "_two", "_three", "_four", "_five"}
    assert of_torch_or_transformers(code) == ["torch._C._two", "torch._C"]


def test_the_one_file_has_a_row_for_each() -> None:
    text = private_names.__doc__ or ""
    code = Path(str(private_names.__file__)).read_text().replace(text, "")
    own = own_names()
    used = {name for name in foreign_private_names(code, own) if name != "_C"}
    assert used == {"_current_graph_task_id", "_composable"}
    for name in (*used, private_names.GENERATOR, private_names._SHIM):
        assert name in text


def test_a_torch_without_a_name_is_refused(monkeypatch, subtests) -> None:
    private_names.check_private_names()
    assert private_names.current_graph_task_id() == -1
    words = rf"torch {torch.__version__[:4]}.* has no torch\.\w+"
    for name in ("current_graph_task_id", "CHECKPOINT_FORWARD", "CHECKPOINT_GENERATOR"):
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setattr(private_names, name, None)
            with pytest.raises(UsageError, match=words):
                private_names.check_private_names()


def test_a_torch_whose_checkpoints_pass_us_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 kept the old name, and called another function."""
    recompute.check_checkpoints.__wrapped__()
    monkeypatch.setattr(recompute, "patch_checkpoints", lambda *_: None)
    with pytest.raises(UsageError, match=r"torch .* makes checkpoints \(use_reentrant=False\)"):
        recompute.check_checkpoints.__wrapped__()
