"""The processes of a run under Ray: rollout replicas and learner ranks, in one placement group."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from onepolicy.config import QuantFormat, RunConfig, ServiceUnavailable, TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.interfaces import EngineCaps, NumericsContract, Progress, RolloutEngine
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
from onepolicy.launch.ray.replica_actor import ReplicaProcess
from onepolicy.models.load import parse_device
from onepolicy.models.quant.size_report import PartSize, SizeReport
from onepolicy.rollout.remote.broadcast import ReplicaBroadcast
from onepolicy.rollout.remote.replicas import Replica, Replicas
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.group import open_store
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights
from onepolicy.train.sharded.ranks import RankLost

MAX_CONCURRENT_CALLS = 100
"""Calls that one replica handles at a time. There are never more than a few."""


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
        self._check_sync_dir()

    def _start_replicas(self, placement: PlacementGroup) -> list[Any]:
        actor_class: Any = ray.remote(ReplicaProcess)
        actors = []
        for i in range(self.cluster.replicas):
            options = placement.actor_options(placement.request.replica_bundle(i))
            actor = actor_class.options(
                max_restarts=self.cluster.restarts, max_concurrency=MAX_CONCURRENT_CALLS, **options
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

    def _check_sync_dir(self) -> None:
        """Raise UsageError if replicas on other machines need a shared folder and none is set."""
        cluster = self.cluster
        elsewhere = any(process.address != self.address for process in self.processes)
        if cluster.sync == "disk" and cluster.sync_dir is None and elsewhere:
            raise UsageError(
                "cluster.sync_dir: replicas are on other machines than this process, and read a "
                "step's weights from files; name a folder that all of them see"
            )

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
        settings = json.dumps(self._engine_settings(spec))
        building = [actor.build.remote(settings, 0) for actor in self.replicas]
        engines: list[Replica] = []
        for i, (actor, reference) in enumerate(zip(self.replicas, building, strict=True)):
            name = f"replica {i}"
            reply = json.loads(_get_at_start(name, reference, self.cluster.start_timeout))
            caps = EngineCaps(**reply["caps"])
            engines.append(ActorEngine(name, actor, settings, caps, self.cluster, self.address))
        # All replicas are built from the same settings, so the last reply is as good as any.
        contract = sizes = None
        if reply["contract"] is not None:
            contract = contract_from_json(reply["contract"])
        if reply["sizes"] is not None and spec.quant is not None:
            sizes = sizes_from_json(spec.quant, *reply["sizes"])
        broadcast = None
        if self.cluster.sync == "stream":
            broadcast = self._broadcast
        return Replicas(
            engines,
            WeightFiles(self.cluster.sync_dir, "cluster.sync_dir"),
            broadcast=broadcast,
            contract=contract,
            sizes=sizes,
        )

    def _engine_settings(self, spec: EngineSpec) -> dict[str, Any]:
        """Return the settings that `replica.build_engine` reads."""
        gpus = self.cluster.gpus_per_replica
        routes, quant = spec.route_spec, spec.quant
        return {
            "model": spec.model.model_dump(),
            "engine": spec.config.model_dump(),
            "routes": routes and dataclasses.asdict(routes),
            "max_len": spec.max_len,
            "combine_weights": spec.combine_weights,
            "numerics": spec.numerics,
            "quant": quant and quant.model_dump(),
            "threads": self.cluster.cpus_per_replica,
            "gpu_share": min(1.0, gpus or 1.0),
            "cuda": self.cuda if gpus is None else gpus > 0,
        }

    def _broadcast(self, written: WrittenWeights, receivers: int) -> ReplicaBroadcast:
        return ReplicaBroadcast(
            written, receivers, host=self.address, limit=self.cluster.reply_timeout
        )


def sizes_from_json(quant: QuantFormat, parts: list[dict[str, Any]], method: str) -> SizeReport:
    """Rebuild the sizes that `Replica.describe` put into JSON."""
    return SizeReport(quant, [PartSize(**part) for part in parts], method)


def contract_from_json(fields: dict[str, Any]) -> NumericsContract:
    """Rebuild the contract that `Replica.describe` put into JSON."""
    modules = tuple((name, text) for name, text in fields["modules"])
    return NumericsContract(**{**fields, "modules": modules})


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
    except RayActorError as error:
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
            except (RayTaskError, RayActorError) as error:
                raise RankLost(f"rank {rank} has ended: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _reserve_driver_gpu(placement: PlacementGroup) -> int:
    """Reserve the GPU in the driver's bundle, select it here, and return its index in torch.

    It stays reserved until the placement group is removed.
    """
    actor_class: Any = ray.remote(DriverReservation)
    actor = actor_class.options(**placement.actor_options(0)).remote()
    (gpu,) = json.loads(ray.get(actor.process_info_json.remote()))["gpus"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = visible.index(gpu) if gpu in visible else int(gpu)
    torch.cuda.set_device(index)
    return index


class DriverReservation:
    """A Ray actor that holds the driver's GPU reserved."""

    def process_info_json(self) -> str:
        return process_info_json()
