"""Call a function once a module of somebody else's package has been imported.

For plugins that run before the package does, in processes that may never import it: nothing is
loaded for them. This module needs the standard library only.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Calling(Loader):
    """A loader that calls what waits for its module as soon as the module has run."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self._loader
        self._loader.exec_module(module)
        for function in _waiting.pop(self._name, []):
            function(module)


class _Finder(MetaPathFinder):
    """Finds the modules that are waited for as Python does, and wraps their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, fullname)
        return spec


def after_import(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call the function with a module: now if it is imported, else as soon as it has run."""
    if name in sys.modules:
        function(sys.modules[name])
        return
    _waiting.setdefault(name, []).append(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
