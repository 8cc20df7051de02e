"""Sources, parsed once for all tests of a process."""

import ast
from functools import cache
from pathlib import Path


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return every node of a file, as `ast.walk` has them."""
    return list(ast.walk(ast.parse(text_of(path))))


@cache
def names_of(path: Path) -> set[str]:
    """Return the names of the functions that a file defines."""
    return {node.name for node in nodes_of(path) if isinstance(node, ast.FunctionDef)}
