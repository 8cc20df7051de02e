"""The processes of a run: on this machine, or placed by Ray."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.address import check_ray_address
from onepolicy.config.base import LARGEST_FLOAT, LARGEST_INT, Frozen, PositiveFloat, SmallCount


class LocalCluster(Frozen):
    """One machine: engine and learner in this process, ranks started by it or by torchrun."""

    kind: Literal["local"] = "local"
    """Engine and learner in this process. It or torchrun starts other ranks."""


class RayCluster(Frozen):
    """Ray places rollout replicas and learner ranks, and restarts replicas.

    The training loop stays in this process.
    """

    kind: Literal["ray"] = "ray"
    """Ray places rollout replicas and learner ranks. The training loop stays in this process."""
    address: str | None = None
    """host:port of a running Ray that this machine is a node of, or auto. Unset: one is started for
    the run, for this machine only."""
    auth: Literal["token", "none"] = "token"
    """none: the Ray at `address` has no token, so whoever reaches its ports can run code."""
    replicas: SmallCount = 1
    """Rollout engines, each in a process of its own."""
    cpus_per_replica: SmallCount = 1
    """CPUs that Ray reserves for a replica, and threads that it computes with."""
    gpus_per_replica: float | None = Field(None, ge=0, le=LARGEST_FLOAT)
    """GPUs that Ray reserves for a replica; below 1 it shares one. Unset: 1 if train.device is
    CUDA, else 0."""
    placement: Literal["pack", "spread"] = "pack"
    """On as few nodes as possible, or on as many."""
    start_timeout: PositiveFloat = 300.0
    """Seconds to place all processes, and for a replica to load its model."""
    reply_timeout: PositiveFloat = 300.0
    """Seconds of silence after which a replica is killed; a busy one answers between two steps."""
    restarts: int = Field(3, ge=0, le=LARGEST_INT)
    """Restarts of each replica by Ray. Then the other replicas take over. 0: none."""
    restart_timeout: PositiveFloat = 600.0
    """Seconds of a restart, with model and weights, after which the replica counts as lost."""

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.address is not None:
            check_ray_address(self.address)
        return self


ClusterConfig = Annotated[LocalCluster | RayCluster, Field(discriminator="kind")]
