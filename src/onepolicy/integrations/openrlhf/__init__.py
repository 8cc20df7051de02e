"""onepolicy in OpenRLHF (0.11.2). docs/other_trainers.md is the guide.

OpenRLHF's trainer lives in Ray actors and has no registry, so `setup` runs in every worker process
and extends four of its classes once they are imported. It loads nothing by itself.
"""

from __future__ import annotations

import pkgutil
from functools import partial
from types import ModuleType

from onepolicy.integrations.core.on_import import after_import

EXTENSIONS = {
    "openrlhf.trainer.ppo_utils.experience_maker": (
        "onepolicy.integrations.openrlhf.experience:extend"
    ),
    "openrlhf.trainer.ppo_trainer": "onepolicy.integrations.openrlhf.experience:extend_trainer",
    "openrlhf.models.loss": "onepolicy.integrations.openrlhf.loss:extend",
    "openrlhf.trainer.ray.ppo_actor": "onepolicy.integrations.openrlhf.loss:extend_actor",
}
"""Module of OpenRLHF -> function that extends it once it is imported."""


def setup() -> None:
    """Prepare a worker process of OpenRLHF.

    Give it to Ray as `worker_process_setup_hook` of the job's runtime environment, and the settings
    as its environment variable ONEPOLICY.
    """
    for name, extend in EXTENSIONS.items():
        after_import(name, partial(_extend, extend))


def _extend(extend: str, module: ModuleType) -> None:
    pkgutil.resolve_name(extend)(module)
