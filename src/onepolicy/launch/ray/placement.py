"""Ray's resources for a run: the request, the placement group, the table of processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup as RayPlacementGroup
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from onepolicy.config import RunConfig, ServiceUnavailable
from onepolicy.config.cluster import RayCluster

Bundle = dict[str, float]  # resource -> amount, as Ray reserves it
STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources of every process, in the order of the placement group's bundles."""

    driver: Bundle | None  # of the learner's first rank, which is in the driver; None on a CPU
    ranks: tuple[Bundle, ...]  # 1..N-1
    replicas: tuple[Bundle, ...]

    @classmethod
    def from_config(cls, config: RunConfig, *, cuda: bool) -> ResourceRequest:
        """Compute the request of a run.

        cuda: the learner computes on GPUs, so the driver's GPU is reserved as well.
        """
        cluster = config.cluster
        assert isinstance(cluster, RayCluster)
        rank_gpus = float(cuda)
        replica_gpus = cluster.gpus_per_replica
        if replica_gpus is None:
            replica_gpus = rank_gpus * getattr(config.rollout.engine, "tensor_parallel_size", 1)
        rank = _bundle(config.train.threads or 1, rank_gpus)
        replica = _bundle(cluster.cpus_per_replica, replica_gpus)
        other_ranks = max(config.train.ranks - 1, 0)
        driver = rank if cuda else None
        return cls(driver, (rank,) * other_ranks, (replica,) * cluster.replicas)

    @property
    def bundles(self) -> list[Bundle]:
        bundles = [*self.ranks, *self.replicas]
        if self.driver is not None:
            bundles.insert(0, self.driver)
        return bundles

    def rank_bundle(self, rank: int) -> int:
        """Return the index of the bundle of rank 1..N-1."""
        return (self.driver is not None) + rank - 1

    def replica_bundle(self, replica: int) -> int:
        """Return the index of the bundle of replica 0..N-1."""
        return (self.driver is not None) + len(self.ranks) + replica


class PlacementGroup:
    """A placement group that Ray has reserved, until `close`."""

    def __init__(self, request: ResourceRequest, cluster: RayCluster) -> None:
        """Reserve the resources. The driver's bundle is on this node.

        Raises ServiceUnavailable, with the request and the nodes, if Ray cannot reserve it within
        cluster.start_timeout.
        """
        bundles = request.bundles
        labels: list[dict[str, str]] = [{} for _ in bundles]
        if request.driver is not None:
            labels[0] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self.request = request
        self.group: RayPlacementGroup = placement_group(
            bundles, strategy=STRATEGIES[cluster.placement], bundle_label_selector=labels
        )
        if not self.group.wait(cluster.start_timeout):
            remove_placement_group(self.group)
            raise ServiceUnavailable(
                f"cluster: Ray found no room within {cluster.start_timeout:g} s "
                f"(cluster.start_timeout) for\n{_request_table(request)}\n"
                f"Its nodes, of which others may use a part:\n{_node_table()}\n"
                "Ask for less (cluster.replicas, cluster.cpus_per_replica, "
                "cluster.gpus_per_replica, train.ranks, train.threads), or add nodes"
            )

    def actor_options(self, index: int) -> dict[str, Any]:
        """Return Ray's options for the actor in bundle `index`."""
        bundle = self.request.bundles[index]
        return {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=index
            ),
        }

    def close(self) -> None:
        """Release the resources."""
        remove_placement_group(self.group)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The node and the GPUs of one process of a run."""

    name: str
    pid: int
    address: str
    node: str
    gpus: tuple[str, ...]

    @classmethod
    def from_json(cls, name: str, text: str) -> ProcessInfo:
        """Read the output of `rank_actor.process_info_json`."""
        fields = json.loads(text)
        gpus = tuple(fields["gpus"])
        return cls(name, fields["pid"], fields["address"], fields["node"], gpus)


def process_table(processes: Sequence[ProcessInfo]) -> str:
    """Return a table of all processes, as text."""
    rows = [("", "process", "node", "GPU")]
    for each in processes:
        node = f"{each.address} ({each.node[:6]})"
        rows.append((each.name, str(each.pid), node, ",".join(each.gpus)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bundle(cpus: int, gpus: float) -> Bundle:
    bundle = {"CPU": float(cpus)}
    if gpus:
        bundle["GPU"] = gpus
    return bundle


def _request_table(request: ResourceRequest) -> str:
    kinds: dict[str, Sequence[Bundle]] = {
        "learner ranks": request.ranks,
        "replicas": request.replicas,
    }
    if request.driver is not None:
        kinds = {"the learner in this process": [request.driver]} | kinds
    lines = []
    for kind, bundles in kinds.items():
        if bundles:
            lines.append(f"  {len(bundles)} x {_amount(bundles[0])}: {kind}")
    return "\n".join(lines)


def _node_table() -> str:
    lines = []
    for node in ray.nodes():
        if node["Alive"]:
            lines.append(f"  {_amount(node['Resources'])}: node {node['NodeManagerAddress']}")
    return "\n".join(lines)


def _amount(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
