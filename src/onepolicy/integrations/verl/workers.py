"""Code that runs in verl's workers: check that the engine is onepolicy's, and set it up."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.verl import policy_loss


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings that the driver sends to every worker."""

    routes: bool  # the rollout returns routes, and a FSDP engine replays them
    native_routes: bool  # scoring returns the trainer's own choice, for dumps
    correction: CorrectionConfig | None  # of the loss `onepolicy`


@dataclass(frozen=True, slots=True)
class ModelRouters:
    """The numbers of a model's routers."""

    layers: tuple[int, ...]  # decoder index of each MoE layer
    depth: int  # decoder layers
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{len(self.layers)} MoE layers, {self.top_k} of {self.num_experts} experts"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The engine of one worker."""

    engine: str  # class of the actor's engine
    is_ours: bool
    routers: ModelRouters | None = None
    problem: str = ""  # the reason why it cannot replay


def set_up(actor: Any, settings: WorkerSettings) -> WorkerReport:
    """Set up the actor's engine and loss in this Ray actor, and describe them.

    actor: the Ray actor. verl puts the workers of several roles into one.
    """
    policy_loss.configure(settings.correction)
    engine = _actor_engine(actor)
    name = f"{type(engine).__module__}.{type(engine).__qualname__}"
    if not settings.routes:
        return WorkerReport(name, is_ours=True)
    ours = importlib.import_module("onepolicy.integrations.verl.engine")
    if not isinstance(engine, ours.ReplayingFSDPEngine):
        return WorkerReport(name, is_ours=False)
    engine.expects_routes = True
    engine.keeps_native = settings.native_routes and not engine.use_ulysses_sp
    try:
        routers = engine.bound_routers()
    except ValueError as error:
        return WorkerReport(name, is_ours=True, problem=str(error))
    numbers = ModelRouters(routers.layers, routers.depth, routers.num_experts, routers.top_k)
    return WorkerReport(name, is_ours=True, routers=numbers)


def _actor_engine(actor: Any) -> Any:
    """Return the engine of the policy that is trained."""
    workers = [actor, *getattr(actor, "worker_dict", {}).values()]
    for worker in workers:
        training = getattr(worker, "actor", None)
        if training is not None:
            return training.engine
    raise AssertionError(f"{type(actor).__name__} holds no actor")
