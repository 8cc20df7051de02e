"""The ways to split a cluster's devices between learners and engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.step_work import (
    devices_per_replica,
    in_process,
    num_servers,
    replicated,
    tensor_parallel_size,
)

ENGINE_SIZES = (1, 2, 4, 8, 16, 32, 64)  # devices of one engine that are tried


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """A number of learner devices, and engines of `tensor_parallel` devices each.

    In one process learner and engine share a device.
    """

    learners: int
    engines: int
    tensor_parallel: int


def possible_splits(
    config: RunConfig,
    cluster: Cluster,
    learners: int | None = None,
    tensor_parallel: int | None = None,
    engines: int | None = None,
) -> list[DeviceSplit]:
    """Return the splits to choose from. A cluster of several nodes is split by nodes.

    An argument that is given is kept. Raises UsageError if no split is possible.
    """
    kind = config.rollout.engine.kind
    if kind in ("hf", "vllm") and tensor_parallel not in (None, 1):
        raise UsageError(
            f"--tensor-parallel: it is for servers; rollout.engine.kind = {kind} has one device, "
            "or under Ray rollout.engine.tensor_parallel_size; leave it out"
        )
    ranks, field = config.train.ranks, "train.ranks"
    if learners:
        ranks, field = learners, "--learners"
    if in_process(config):
        return _in_process_splits(config, cluster, ranks, engines, field)
    if replicated(config):
        return [_ray_split(config, cluster, ranks, engines)]
    if cluster.count < 2:
        raise UsageError(
            f"--cluster: {cluster} has no second device for the server of rollout.engine.kind = "
            f"{kind}; give more, or use hf or vllm, which live in the learner's process"
        )
    if ranks >= cluster.count:
        raise UsageError(
            f"{field}: {ranks} of {cluster.count} devices leave none for an engine; lower it"
        )
    return _server_splits(cluster, ranks, tensor_parallel, engines or num_servers(config))


def _in_process_splits(
    config: RunConfig, cluster: Cluster, ranks: int, engines: int | None, field: str
) -> list[DeviceSplit]:
    if engines not in (None, 1):
        raise UsageError(
            f"--engines: {engines}, but there is one, in the learner's process; "
            "give cluster.kind=ray"
        )
    most = cluster.count
    if config.rollout.engine.kind == "vllm":
        most = 1
    if ranks > most:
        raise UsageError(
            f"{field}: {ranks} of {most} devices this engine's process can have; lower it"
        )
    return [DeviceSplit(count, 1, 1) for count in _learner_counts(ranks, most, cluster.per_node)]


def _ray_split(config: RunConfig, cluster: Cluster, ranks: int, engines: int | None) -> DeviceSplit:
    """Return the split for Ray's replicas. Without ranks the driver learns alone."""
    assert isinstance(config.cluster, RayCluster)
    engines = engines or config.cluster.replicas
    replica_devices = devices_per_replica(config, cpu=cluster.is_cpu)
    for_engines = math.ceil(engines * replica_devices)
    if 0 < replica_devices < 1:  # a device holds whole replicas
        for_engines = math.ceil(engines / math.floor(1 / replica_devices + 1e-9))
    needed = max(1, ranks) + for_engines
    if needed > cluster.count:
        raise UsageError(
            f"--cluster: {cluster}, but {max(1, ranks)} learners and {engines} replicas of "
            f"{replica_devices:g} devices need {needed}; give more devices or fewer of these"
        )
    return DeviceSplit(max(1, ranks), engines, tensor_parallel_size(config))


def _server_splits(
    cluster: Cluster, ranks: int, tensor_parallel: int | None, engines: int
) -> list[DeviceSplit]:
    counts = _learner_counts(ranks, cluster.count - 1, cluster.per_node)
    sizes = (tensor_parallel,) if tensor_parallel else ENGINE_SIZES
    splits = [
        DeviceSplit(count, engines, size)
        for count in counts
        for size in sizes
        if count + engines * size <= cluster.count
    ]
    if not splits:
        raise UsageError(
            f"--engines: {engines} of {sizes[0]} devices and {counts[0]} learners are more than "
            f"{cluster.count}; give fewer"
        )
    return splits


def _learner_counts(ranks: int, most: int, per_node: int) -> list[int]:
    """Return the numbers of learners to try: `ranks` if it is set, else up to `most`.

    Beyond one node only whole nodes are tried.
    """
    if ranks:
        return [ranks]
    if most <= per_node:
        return list(range(1, most + 1))
    return list(range(per_node, most + 1, per_node))
