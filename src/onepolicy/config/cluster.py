"""Where the processes of a run live: on this machine, or where Ray places them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.address import check_ray_address
from onepolicy.config.base import LARGEST, MOST, Amount, Few, Frozen


class LocalCluster(Frozen):
    """This machine: engine and learner in this process, other ranks started by it or by torchrun."""

    kind: Literal["local"] = "local"


class RayCluster(Frozen):
    """Ray places rollout replicas and learner ranks and restarts replicas. The loop itself stays in this process."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """host:port of a running Ray, or auto: the one that this machine is a node of. Unset: one is started on this
    machine for the run, reachable from this machine only."""
    auth: Literal["token", "none"] = "token"
    """none: the Ray at `address` was started without token authentication, so who reaches its ports can run code."""
    replicas: Few = 1
    """Rollout engines, each in a process of its own."""
    cpus_per_replica: Few = 1
    """CPUs that Ray reserves for a replica, and threads it computes with."""
    gpus_per_replica: float | None = Field(None, ge=0, le=LARGEST)
    """GPUs that Ray reserves for a replica; a part of one shares it. Unset: 1 if train.device is CUDA, else 0."""
    placement: Literal["pack", "spread"] = "pack"
    """Replicas and ranks on as few nodes as possible, or on as many."""
    sync: Literal["stream", "disk"] = "stream"
    """How a step's weights reach the replicas: each is sent them over the network, or reads the files in sync_dir."""
    sync_dir: str | None = None
    """Folder that the driver writes a step's weights into, two versions for a while. Unset: the system's temporary one,
    which often is memory. sync = disk with replicas on other machines needs one that all nodes see."""
    start_timeout: Amount = 300.0
    """Seconds that Ray gets to find room for all processes, and a replica to load its model."""
    reply_timeout: Amount = 300.0
    """Seconds after which a replica that says nothing is killed; a busy one answers between two steps of its engine,
    one that is sent weights when it has them."""
    restarts: int = Field(3, ge=0, le=MOST)
    """Of each replica, by Ray. Afterwards the other replicas take over; the run ends when none is left."""
    restart_timeout: Amount = 600.0
    """Seconds that a restart may take, model and weights included, before the replica counts as lost."""

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        if self.address is not None:
            check_ray_address(self.address)
        if self.auth == "none" and self.address is None:
            raise ValueError(
                "cluster.auth: none has no effect without cluster.address, where Ray is started with a token; leave it "
                "out"
            )
        return self


ClusterConfig = Annotated[LocalCluster | RayCluster, Field(discriminator="kind")]
