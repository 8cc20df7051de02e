"""onepolicy in OpenRLHF (0.11.2). docs/openrlhf.md is the guide.

OpenRLHF's trainer lives in Ray actors and has no registry, so `setup` runs in every worker process
and extends four of its classes once they are imported. It loads nothing by itself.
"""

from __future__ import annotations

from types import ModuleType

from onepolicy.integrations.core.on_import import after_import


def setup() -> None:
    """Prepare a worker process of OpenRLHF.

    Give it to Ray as `worker_process_setup_hook` of the job's runtime environment, and the settings
    as its environment variable ONEPOLICY.
    """
    after_import("openrlhf.trainer.ppo_utils.experience_maker", _extend_experience_maker)
    after_import("openrlhf.trainer.ppo_trainer", _extend_trainer)
    after_import("openrlhf.models.loss", _extend_loss)
    after_import("openrlhf.trainer.ray.ppo_actor", _extend_actor)


def _extend_experience_maker(module: ModuleType) -> None:
    from onepolicy.integrations.openrlhf.experience import extend

    extend(module)


def _extend_trainer(module: ModuleType) -> None:
    from onepolicy.integrations.openrlhf.experience import extend_trainer

    extend_trainer(module)


def _extend_loss(module: ModuleType) -> None:
    from onepolicy.integrations.openrlhf.loss import extend

    extend(module)


def _extend_actor(module: ModuleType) -> None:
    from onepolicy.integrations.openrlhf.loss import extend_actor

    extend_actor(module)
