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

from onepolicy.config import NotThere, QuantFormat, RunConfig, TrainingError, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.interfaces import EngineCaps, Progress, RolloutEngine
from onepolicy.launch.launcher import Launcher
from onepolicy.launch.rank_info import LaunchedRanks, RankInfo
from onepolicy.launch.ranks import INTERFACE, gloo_on_loopback, loopback_interface
from onepolicy.launch.ray.placement import PlacementGroup, ProcessInfo, ResourceRequest, table
from onepolicy.launch.ray.rank_actor import RankProcess, process_info_json
from onepolicy.launch.ray.remote_engine import RemoteEngine, remote_error
from onepolicy.launch.ray.replica_actor import ReplicaProcess
from onepolicy.models.load import parse_device
from onepolicy.models.quant.size_report import PartSize, SizeReport
from onepolicy.rollout.fleet.broadcast import Broadcast
from onepolicy.rollout.fleet.replicas import Replica, Replicas
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.group import open_store
from onepolicy.sync.weight_files import WeightFiles, Written
from onepolicy.train.sharded.channel import RankLost
from onepolicy.types import NumericsContract

CALLS = 100
"""That one replica answers at a time; there are never more than a few."""


@contextmanager
def ray_launcher(config: RunConfig, cluster: RayCluster, progress: Progress) -> Iterator[Launcher]:
    """Ray is connected. All processes are placed here and now, and start when the run asks for them."""
    cuda = parse_device(config.train.device).type == "cuda"
    room = PlacementGroup(ResourceRequest.from_config(config, cuda=cuda), cluster)
    try:
        processes = _Processes(config, cluster, room, cuda)
        progress.note(table(processes.where))
        yield Launcher(processes.launch_ranks, processes.build_engine)
    finally:
        room.close()


class _Processes:
    """Actors of a run, one in every bundle."""

    def __init__(
        self, config: RunConfig, cluster: RayCluster, room: PlacementGroup, cuda: bool
    ) -> None:
        self.config, self.cluster, self.cuda = config, cluster, cuda
        needs = room.needs
        self.local_rank = _take_gpu(room) if needs.driver else 0
        self.address = ray.util.get_node_ip_address()
        self._own_loopback = self.address.startswith("127.")
        environment = {INTERFACE: loopback_interface()} if self._own_loopback else {}
        replica: Any = ray.remote(ReplicaProcess)
        rank: Any = ray.remote(RankProcess)
        self.replicas = [
            replica.options(
                max_restarts=cluster.restarts,
                max_concurrency=CALLS,
                **room.options(needs.replica(i)),
            ).remote()
            for i in range(cluster.replicas)
        ]
        self.ranks = [
            rank.options(**room.options(needs.rank(i))).remote(environment)
            for i in range(1, len(needs.ranks) + 1)
        ]
        self.where = [
            ProcessInfo.from_json(
                "driver" + ", rank 0" * bool(config.train.ranks), process_info_json()
            )
        ]
        named: list[tuple[str, Any]] = [
            (f"rank {i}", actor) for i, actor in enumerate(self.ranks, start=1)
        ]
        named += [(f"replica {i}", actor) for i, actor in enumerate(self.replicas)]
        for name, actor in named:
            self.where.append(
                ProcessInfo.from_json(
                    name, _get(name, actor.process_info_json.remote(), cluster.start_timeout)
                )
            )
        if (
            cluster.weights == "disk"
            and cluster.shared_dir is None
            and {each.address for each in self.where} != {self.address}
        ):
            raise UsageError(
                "cluster.shared_dir: replicas are on other machines than this process, and read a step's weights from "
                "files; name a folder that all of them see"
            )

    @contextmanager
    def launch_ranks(self, config: RunConfig) -> Iterator[LaunchedRanks]:
        """The learner's ranks, which meet at a store of this process and hear of its token from Ray."""
        with gloo_on_loopback() if self._own_loopback else nullcontext():
            store = open_store(self.address, config.train.rank_timeout)
            serving: list[Any] = []

            def publish_address(driver: str) -> None:
                for i, actor in enumerate(self.ranks, start=1):
                    serving.append(
                        actor.serve.remote(
                            i, config.train.ranks, (self.address, store.port), driver
                        )
                    )

            place = RankInfo(0, config.train.ranks, self.local_rank, False)
            yield LaunchedRanks(
                place, store, self.address, publish_address, partial(_alive, serving)
            )

    def build_engine(self, spec: EngineSpec) -> RolloutEngine:
        """All replicas' engines, built at the same time. Ray gives each its own device, not the learner's."""
        about = {
            "model": spec.model.model_dump(),
            "engine": spec.config.model_dump(),
            "routes": None if spec.routes is None else dataclasses.asdict(spec.routes),
            "max_len": spec.max_len,
            "combine_weights": spec.combine_weights,
            "numerics": spec.numerics,
            "quant": None if spec.quant is None else spec.quant.model_dump(),
            "threads": self.cluster.cpus_per_replica,
            "cuda": self.cuda
            if self.cluster.gpus_per_replica is None
            else self.cluster.gpus_per_replica > 0,
        }
        text = json.dumps(about)
        building = [actor.build.remote(text, 0) for actor in self.replicas]
        engines: list[Replica] = []
        for i, (actor, reference) in enumerate(zip(self.replicas, building, strict=True)):
            built = json.loads(_get(f"replica {i}", reference, self.cluster.start_timeout))
            engines.append(
                RemoteEngine(
                    f"replica {i}",
                    actor,
                    text,
                    EngineCaps(**built["caps"]),
                    self.cluster,
                    self.address,
                )
            )
        contract, sizes = built["contract"], built["sizes"]
        return Replicas(
            engines,
            WeightFiles(self.cluster.shared_dir, "cluster.shared_dir"),
            broadcast=self._broadcast if self.cluster.weights == "stream" else None,
            contract=None if contract is None else contract_of(contract),
            sizes=None if spec.quant is None or sizes is None else sizes_of(spec.quant, *sizes),
        )

    def _broadcast(self, written: Written, receivers: int) -> Broadcast:
        return Broadcast(written, receivers, host=self.address, limit=self.cluster.reply_timeout)


def sizes_of(quant: QuantFormat, parts: list[dict[str, Any]], method: str) -> SizeReport:
    """As it was before JSON, like `contract_of`."""
    return SizeReport(quant, [PartSize(**part) for part in parts], method)


def contract_of(about: dict[str, Any]) -> NumericsContract:
    return NumericsContract(
        **{**about, "modules": tuple((name, text) for name, text in about["modules"])}
    )


def _get(name: str, reference: Any, limit: float) -> Any:
    """What a process answers while the run starts."""
    try:
        return ray.get(reference, timeout=limit)
    except GetTimeoutError:
        raise NotThere(
            f"{name} did not start within {limit:g} s (cluster.start_timeout); see Ray's logs"
        ) from None
    except RayTaskError as error:
        raise remote_error(name, error) from None
    except RayActorError as error:
        raise TrainingError(f"{name} ended while it started: {_last(error)}") from None


def _alive(serving: list[Any]) -> None:
    """RankLost if one of the ranks has ended already."""
    for rank, reference in enumerate(serving, start=1):
        if ray.wait([reference], timeout=0)[0]:
            try:
                ray.get(reference)
            except (RayTaskError, RayActorError) as error:
                raise RankLost(f"rank {rank} ended before it had joined: {_last(error)}") from None


def _last(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def _take_gpu(room: PlacementGroup) -> int:
    """The GPU in the driver's bundle, as torch numbers it here; it stays reserved while the placement group lives."""
    reservation: Any = ray.remote(Reservation)
    reserved = reservation.options(**room.options(0)).remote()
    (name,) = json.loads(ray.get(reserved.process_info_json.remote()))["gpus"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = visible.index(name) if name in visible else int(name)
    torch.cuda.set_device(number)
    return number


class Reservation:
    """A Ray actor that stands for this process."""

    def process_info_json(self) -> str:
        return process_info_json()
