"""onepolicy at home in verl 0.9: routing replay for its FSDP engine, corrections, metrics, dumps.

verl imports this module in every process (entry point group `verl.plugins`), while `import verl`
still runs. So it loads nothing and changes nothing: it only waits for the three modules of verl
that have a registry, and registers there once they are imported:

| module of verl | registered | used with |
| --- | --- | --- |
| `verl.workers.engine` | engine of vendor `onepolicy` | `VERL_ENGINE_VENDOR=onepolicy` |
| `verl.trainer.ppo.v1` | trainers `onepolicy_sync`, .. | `trainer.v1.trainer_mode=onepolicy_sync` |
| `verl.trainer.ppo.core_algos` | loss `onepolicy` | `policy_loss.loss_mode=onepolicy` |

docs/verl.md has the settings.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType

VENDOR = "onepolicy"
VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"


REGISTRATIONS = {
    "verl.workers.engine": f"{__name__}.engine",
    "verl.trainer.ppo.v1": f"{__name__}.trainer",
    "verl.trainer.ppo.core_algos": f"{__name__}.policy_loss",
}
"""Module of verl -> module here that registers with it when it is imported."""


class _Registering(Loader):
    """A loader that registers with a module of verl as soon as the module has run."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self._loader
        self._loader.exec_module(module)
        register(self._name)


class _Waiting(MetaPathFinder):
    """Finds the modules of REGISTRATIONS as Python does, and wraps their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in REGISTRATIONS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader, fullname)
        return spec


def register(name: str) -> None:
    """Register with one imported module of verl.

    A verl or transformers that this package cannot be imported beside is a warning: whoever did not
    ask for onepolicy must not be stopped by it.
    """
    if name == "verl.workers.engine" and os.environ.get(VENDOR_VARIABLE) != VENDOR:
        return
    try:
        importlib.import_module(REGISTRATIONS[name])
    except ImportError as error:
        logging.getLogger(__name__).warning("onepolicy is not registered with %s: %s", name, error)


def _register_now_or_later() -> None:
    for name in REGISTRATIONS:
        if name in sys.modules:
            register(name)
    if not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


_register_now_or_later()
