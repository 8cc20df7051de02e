"""onepolicy at home in verl 0.9: routing replay for its FSDP engine, corrections, metrics, dumps.

verl imports this module in every process (entry point group `verl.plugins`), while `import verl`
still runs. So it loads nothing and changes nothing: it only waits for the three modules of verl
that have a registry, and registers there once they are imported:

| module of verl | registered | used with |
| --- | --- | --- |
| `verl.workers.engine` | engine of vendor `onepolicy` | `VERL_ENGINE_VENDOR=onepolicy` |
| `verl.trainer.ppo.v1` | trainers `onepolicy_sync`, .. | `trainer.v1.trainer_mode=onepolicy_sync` |
| `verl.trainer.ppo.core_algos` | loss `onepolicy` | `policy_loss.loss_mode=onepolicy` |

docs/trainers.md has the settings.
"""

from __future__ import annotations

import importlib
import logging
import os

from onepolicy.integrations.core.on_import import after_import

VENDOR = "onepolicy"
VENDOR_VARIABLE = "VERL_ENGINE_VENDOR"
REGISTRATIONS = {
    "verl.workers.engine": f"{__name__}.engine",
    "verl.trainer.ppo.v1": f"{__name__}.trainer",
    "verl.trainer.ppo.core_algos": f"{__name__}.policy_loss",
}
"""Module of verl -> module here that registers with it when it is imported."""


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


for _name in REGISTRATIONS:
    after_import(_name, lambda module: register(module.__name__))
