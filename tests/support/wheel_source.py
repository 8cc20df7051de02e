"""Pieces of an unpacked wheel of vLLM, run without the rest of it and without its dependencies."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        return cls if anything(name) else None

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Anything(metaclass=_Anything):
    """A stand-in for every name that the wheel's modules import and do not use here."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        only_function = len(args) == 1 and isinstance(args[0], types.FunctionType | type)
        if only_function:  # a decorator leaves its function as it is
            return args[0]
        return object.__new__(cls)

    def __getattr__(self, name: str) -> Any:
        return Anything


def anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything


class Wheel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules and pieces of one wheel's source. Its other modules are empty."""

    def __init__(self, root: Path, version: str, given: dict[str, dict[str, Any]]) -> None:
        self.root, self.version, self.given = root / version, version, given

    def __enter__(self) -> Wheel:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            del sys.modules[name]

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name == "vllm" or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__dict__.update(self.given.get(spec.name, {}))
        module.__getattr__ = anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def module(self, path: str) -> Any:
        """Run a module of the wheel whole, under its own name so that its other modules find it."""
        name = path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, self.root / path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def tree(self, path: str) -> ast.Module:
        return ast.parse((self.root / path).read_text())

    def function(self, path: str, name: str, names: dict[str, Any]) -> Any:
        """Return one function or method of a module, without its annotations."""
        functions = (n for n in ast.walk(self.tree(path)) if isinstance(n, ast.FunctionDef))
        node = next(function for function in functions if function.name == name)
        node.decorator_list = []
        node.returns = None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        space = dict(names)
        exec(compile(ast.Module([node], []), path, "exec"), space)
        return space[name]

    def statement(self, path: str, containing: str, kind: type[ast.stmt] = ast.If) -> Any:
        """Return the innermost statement of this kind in a module whose source has `containing`,
        compiled."""
        nodes = (n for n in ast.walk(self.tree(path)) if isinstance(n, kind))
        found = {ast.unparse(n): n for n in nodes if containing in ast.unparse(n)}
        return compile(ast.Module([found[min(found, key=len)]], []), path, "exec")

    def argument(self, path: str, call: str, name: str) -> Any:
        """Return the expression passed as `name` in the call of `call`, compiled."""
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == call:
                for keyword in node.keywords:
                    if keyword.arg == name:
                        return compile(ast.Expression(keyword.value), path, "eval")
        raise LookupError(f"{path}: no {call}({name}=...)")
