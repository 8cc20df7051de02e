"""How much room a run needs, Ray's placement group for it, and what is where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup as RayPlacementGroup
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from onepolicy.config import NotThere, RunConfig
from onepolicy.config.cluster import RayCluster

Bundle = dict[str, float]
STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Of every process: what Ray reserves for it. In the order of the placement group's bundles."""

    driver: Bundle | None  # of the learner's first rank, which lives in the driver; None: nothing
    ranks: tuple[Bundle, ...]  # 1..N-1
    replicas: tuple[Bundle, ...]

    @classmethod
    def from_config(cls, config: RunConfig, *, cuda: bool) -> ResourceRequest:
        """cuda: the learner computes on GPUs. Then the driver's is reserved too, on its own node."""
        cluster = config.cluster
        assert isinstance(cluster, RayCluster)
        gpus = float(cuda) if cluster.gpus_per_replica is None else cluster.gpus_per_replica
        rank = _bundle(config.train.threads or 1, float(cuda))
        return cls(
            rank if cuda else None,
            (rank,) * max(config.train.ranks - 1, 0),
            (_bundle(cluster.cpus_per_replica, gpus),) * cluster.replicas,
        )

    @property
    def bundles(self) -> list[Bundle]:
        return [*([self.driver] if self.driver else []), *self.ranks, *self.replicas]

    def rank(self, rank: int) -> int:
        """Index of the bundle of rank 1..N-1."""
        return (self.driver is not None) + rank - 1

    def replica(self, replica: int) -> int:
        return (self.driver is not None) + len(self.ranks) + replica


class PlacementGroup:
    """A placement group that is there. `close` gives it back."""

    def __init__(self, needs: ResourceRequest, cluster: RayCluster) -> None:
        """NotThere, with what is missing, if Ray does not find it within cluster.start_timeout."""
        own = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        labels = [own if needs.driver and i == 0 else {} for i in range(len(needs.bundles))]
        self.needs = needs
        self.group: RayPlacementGroup = placement_group(
            needs.bundles, strategy=STRATEGIES[cluster.placement], bundle_label_selector=labels
        )
        if not self.group.wait(cluster.start_timeout):
            remove_placement_group(self.group)
            raise NotThere(
                f"cluster: Ray found no room within {cluster.start_timeout:g} s (cluster.start_timeout) for\n"
                f"{_listed(needs)}\nIts nodes, of which others may use a part:\n{_nodes()}\nAsk for "
                "less (cluster.replicas, cluster.cpus_per_replica, cluster.gpus_per_replica, train.ranks, "
                "train.threads), or add nodes"
            )

    def options(self, index: int) -> dict[str, Any]:
        """Of the actor in bundle `index`."""
        bundle = self.needs.bundles[index]
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=index
            ),
        }

    def close(self) -> None:
        remove_placement_group(self.group)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """Of one process."""

    name: str
    pid: int
    address: str
    node: str
    gpus: tuple[str, ...]

    @classmethod
    def from_json(cls, name: str, text: str) -> ProcessInfo:
        about = json.loads(text)
        return cls(name, about["pid"], about["address"], about["node"], tuple(about["gpus"]))


def table(where: Sequence[ProcessInfo]) -> str:
    rows = [("", "process", "node", "GPU")]
    rows += [
        (each.name, str(each.pid), f"{each.address} ({each.node[:6]})", ",".join(each.gpus))
        for each in where
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _bundle(cpus: int, gpus: float) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def _listed(needs: ResourceRequest) -> str:
    kinds = {
        "the learner in this process": [needs.driver] if needs.driver else [],
        "learner ranks": needs.ranks,
    }
    kinds["replicas"] = needs.replicas
    return "\n".join(
        f"  {len(some)} x {_amount(some[0])}: {kind}" for kind, some in kinds.items() if some
    )


def _nodes() -> str:
    living = [node for node in ray.nodes() if node["Alive"]]
    return "\n".join(
        f"  {_amount(node['Resources'])}: node {node['NodeManagerAddress']}" for node in living
    )


def _amount(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
