"""The processes of a run under Ray: rollout replicas and learner ranks, in one placement group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from onepolicy.config import RunConfig, ServiceUnavailable, TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.config.input_files import absolute_path
from onepolicy.interfaces import Progress, RolloutEngine
from onepolicy.launch.agent import environment, on_loopback
from onepolicy.launch.launcher import Launcher
from onepolicy.launch.ranks import LaunchedRanks, RankInfo
from onepolicy.launch.ray.actor_engine import ActorEngine, remote_error
from onepolicy.launch.ray.placement import (
    PlacementGroup,
    ProcessInfo,
    ResourceRequest,
    process_table,
)
from onepolicy.launch.ray.rank_actor import RankProcess, process_info_json
from onepolicy.launch.ray.replica_actor import EngineState, ReplicaProcess
from onepolicy.launch.ray.replicas import Replica, Replicas
from onepolicy.models.load import parse_device
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.group import open_store
from onepolicy.train.sharded.ranks import RankLost

MAX_CONCURRENT_CALLS = 100_000
"""Calls that one replica handles at a time: all of its requests, and a sign of life."""


@contextmanager
def ray_launcher(config: RunConfig, cluster: RayCluster, progress: Progress) -> Iterator[Launcher]:
    """Place all processes of the run at once and yield their launcher. Ray must be connected.

    The processes start their work when the run asks for it.
    """
    cuda = parse_device(config.train.device).type == "cuda"
    placement = PlacementGroup(ResourceRequest.from_config(config, cuda=cuda), cluster)
    try:
        actors = _RunActors(config, cluster, placement, cuda)
        progress.note(process_table(actors.processes))
        yield Launcher(actors.launch_ranks, actors.build_engine)
    finally:
        placement.close()


class _RunActors:
    """The actors of a run, one in every bundle of the placement group."""

    def __init__(
        self, config: RunConfig, cluster: RayCluster, placement: PlacementGroup, cuda: bool
    ) -> None:
        self.config, self.cluster, self.cuda = config, cluster, cuda
        self.local_rank = 0
        if placement.request.driver is not None:
            self.local_rank = _reserve_driver_gpu(placement)
        self.address = ray.util.get_node_ip_address()
        self._on_loopback = self.address.startswith("127.")
        self.replicas = self._start_replicas(placement)
        self.ranks = self._start_ranks(placement)
        self.processes = self._process_infos()

    def _start_replicas(self, placement: PlacementGroup) -> list[Any]:
        actor_class: Any = ray.remote(ReplicaProcess)
        actors = []
        for i in range(self.cluster.replicas):
            options = placement.actor_options(placement.request.replica_bundle(i))
            actor = actor_class.options(
                max_restarts=self.cluster.restarts,
                max_task_retries=-1,
                max_concurrency=MAX_CONCURRENT_CALLS,
                **options,
            )
            actors.append(actor.remote())
        return actors

    def _start_ranks(self, placement: PlacementGroup) -> list[Any]:
        variables = {}
        if self._on_loopback:
            variables = on_loopback()
        actor_class: Any = ray.remote(RankProcess)
        actors = []
        for rank in range(1, len(placement.request.ranks) + 1):
            options = placement.actor_options(placement.request.rank_bundle(rank))
            actors.append(actor_class.options(**options).remote(variables))
        return actors

    def _process_infos(self) -> list[ProcessInfo]:
        """Return the driver, the ranks and the replicas. Waits until all of them have started."""
        driver = "driver"
        if self.config.train.ranks:
            driver = "driver, rank 0"
        processes = [ProcessInfo.from_json(driver, process_info_json())]
        actors = {f"rank {i}": actor for i, actor in enumerate(self.ranks, start=1)}
        actors |= {f"replica {i}": actor for i, actor in enumerate(self.replicas)}
        for name, actor in actors.items():
            text = _get_at_start(name, actor.process_info_json.remote(), self.cluster.start_timeout)
            processes.append(ProcessInfo.from_json(name, text))
        return processes

    @contextmanager
    def launch_ranks(self, config: RunConfig) -> Iterator[LaunchedRanks]:
        """Open the ranks' store in this process, start the ranks and yield them."""
        with environment(on_loopback()) if self._on_loopback else nullcontext():
            store = open_store(self.address, config.train.rank_timeout)
            store_address = (self.address, store.port)
            count = config.train.ranks
            running = [
                actor.run_rank.remote(rank, count, store_address)
                for rank, actor in enumerate(self.ranks, start=1)
            ]
            rank_info = RankInfo(0, count, self.local_rank)
            yield LaunchedRanks(rank_info, store, partial(_check_ranks_alive, running))

    def build_engine(self, spec: EngineSpec) -> RolloutEngine:
        """Build the engines of all replicas at the same time.

        Ray gives each replica its own device.
        """
        spec_of_replicas = ray.put(self._replica_spec(spec))
        state = EngineState(spec_of_replicas, self.cluster.cpus_per_replica)
        building = [actor.load.remote(state) for actor in self.replicas]
        engines: list[Replica] = []
        for i, (actor, reference) in enumerate(zip(self.replicas, building, strict=True)):
            name = f"replica {i}"
            loaded = _get_at_start(name, reference, self.cluster.start_timeout)
            engines.append(ActorEngine(name, actor, state, loaded, self.cluster))
        return Replicas(engines, ray.put)

    def _replica_spec(self, spec: EngineSpec) -> EngineSpec:
        """Return the spec of a replica's engine, which has no learner beside it."""
        gpus = self.cluster.gpus_per_replica
        device = "cpu"
        if self.cuda if gpus is None else gpus > 0:
            device = "cuda"
        return EngineSpec(
            spec.model.model_copy(update={"path": absolute_path(spec.model.path)}),
            spec.config,
            torch.device(device),
            spec.max_len,
            route_spec=spec.route_spec,
            combine_weights=spec.combine_weights,
            numerics=spec.numerics,
            quant=spec.quant,
            gpu_share=min(1.0, gpus or 1.0),
        )


def _get_at_start(name: str, reference: Any, timeout: float) -> Any:
    """Wait for the reply of process `name` while the run starts.

    Raises ServiceUnavailable if there is none within `timeout` seconds, TrainingError if the
    process has ended.
    """
    try:
        return ray.get(reference, timeout=timeout)
    except GetTimeoutError:
        raise ServiceUnavailable(
            f"{name} did not start within {timeout:g} s (cluster.start_timeout); see Ray's logs"
        ) from None
    except RayTaskError as error:
        raise remote_error(name, error) from None
    except RayError as error:
        raise TrainingError(f"{name} ended while it started: {_last_line(error)}") from None


def _check_ranks_alive(running: list[Any]) -> None:
    """Raise RankLost if a rank has ended with an error.

    running: references to the results of `run_rank`.
    """
    for rank, reference in enumerate(running, start=1):
        ended, _ = ray.wait([reference], timeout=0)
        if ended:
            try:
                ray.get(reference)
            except RayError as error:
                raise RankLost(f"rank {rank} has ended: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _reserve_driver_gpu(placement: PlacementGroup) -> int:
    """Reserve the GPU in the driver's bundle, select it here, and return its index in torch.

    It stays reserved until the placement group is removed. Raises UsageError for a GPU that this
    process does not see.
    """
    actor_class: Any = ray.remote(DriverReservation)
    actor = actor_class.options(**placement.actor_options(0)).remote()
    (gpu,) = json.loads(ray.get(actor.process_info_json.remote()))["gpus"]
    index = _index_of_gpu(gpu, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    torch.cuda.set_device(index)
    return index


def _index_of_gpu(gpu: str, variable: str) -> int:
    """Return the index in torch of a GPU of Ray. variable: this process's CUDA_VISIBLE_DEVICES."""
    visible = [each.strip() for each in variable.split(",")]
    if gpu in visible:
        return visible.index(gpu)
    if variable or not gpu.isdecimal():
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES: Ray has reserved GPU {gpu} for this process, which sees "
            f"{variable or 'all by their numbers'}; set it to what it was as Ray was started here"
        )
    return int(gpu)


class DriverReservation:
    """A Ray actor that holds the driver's GPU reserved."""

    def process_info_json(self) -> str:
        return process_info_json()
