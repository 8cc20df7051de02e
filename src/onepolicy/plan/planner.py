"""A recipe and a cluster -> what every device holds, where a step's seconds go, which split of devices is best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from onepolicy.config import ModelConfig, RunConfig, UsageError
from onepolicy.config.cluster import RayCluster
from onepolicy.config.numerics import ON_POLICY
from onepolicy.plan.dims import Dims, read_dims, read_hf_config
from onepolicy.plan.dry_run import DryRunModel, MicroBatchMemory, MicroBatchShape
from onepolicy.plan.engine_memory import EngineMemory, EngineWeights, engine_memory, engine_weights
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.learner_memory import (
    CheckpointCost,
    LearnerMemory,
    StartMemory,
    checkpoint_cost,
    compute_dtype,
    learner_memory,
    start_memory,
)
from onepolicy.plan.step_work import (
    StepWork,
    devices_per_replica,
    in_process,
    replicated,
    step_work,
)
from onepolicy.plan.times import (
    LearningTime,
    RolloutTime,
    default_sync_method,
    learning_time,
    rollout_time,
    sync_seconds,
)

PARALLEL = (1, 2, 4, 8, 16, 32, 64)  # devices of one engine that are tried


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Devices that learn, and engines of `tensor_parallel` devices that sample. In one process they share a device."""

    learners: int
    engines: int
    tensor_parallel: int


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A split, what it holds and how long it takes."""

    split: DeviceSplit
    learner: LearnerMemory
    engine: EngineMemory
    rollout: RolloutTime
    learning: LearningTime
    sync: float
    start: StartMemory
    save: CheckpointCost
    learner_room: float  # bytes a rank may use
    host_room: float  # bytes of a node's own memory
    engine_on_learner: bool
    overlaps: bool  # rollout.max_staleness lets sampling and learning run at the same time, each on its own devices

    @property
    def learner_used(self) -> float:
        engine = self.engine.weights + self.engine.cache if self.engine_on_learner else 0.0
        return max(self.learner.total + engine + self.engine.evaluator, self.start.device)

    @property
    def learner_fits(self) -> bool:
        return self.learner_used <= self.learner_room

    @property
    def host_fits(self) -> bool:
        return max(self.start.host, self.save.staged) <= self.host_room

    @property
    def engine_fits(self) -> bool:
        return (
            self.engine.sequences >= 1
            and self.engine.weights + self.engine.cache <= self.engine.room
        )

    @property
    def fits(self) -> bool:
        return self.learner_fits and self.engine_fits and self.host_fits

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step, in their order."""
        return {
            "rollout: prefill": self.rollout.prefill,
            "rollout: decode": self.rollout.decode,
            "score": self.learning.score,
            "update": self.learning.update,
            "sync": self.sync,
        }

    @property
    def seconds(self) -> float:
        return self.overlapped if self.overlaps else sum(self.parts.values())

    @property
    def overlapped(self) -> float:
        """Sampling and learning at the same time: a step waits for the longer of them, and for its weights."""
        return max(self.rollout.seconds, self.learning.score + self.learning.update) + self.sync

    @property
    def bottleneck(self) -> str:
        """The part that takes most, and what in it."""
        name = max(self.parts, key=lambda part: self.parts[part])
        if name == "rollout: decode":
            return f"{name}: {self.rollout.step.bound}"
        return f"{name}: {self.learning.bound}" if name in ("score", "update") else name


class Planner:
    """One recipe on one cluster. Dry runs are made when they are needed and kept."""

    def __init__(
        self,
        config: RunConfig,
        model: ModelConfig,
        cluster: Cluster,
        *,
        prompt: int | None = None,
        response: int | None = None,
        sync_method: str | None = None,
    ) -> None:
        """model: config.model with its path resolved. way: how weights reach the engines, unset: as the engine does."""
        _refuse_unplanned(config, cluster)
        self.config, self.cluster = config, cluster
        self._hf_config = read_hf_config(model)
        self._models: dict[str, DryRunModel] = {}  # by the dtype that layers compute in
        self.dims: Dims = read_dims(self._model(compute_dtype(config)).model, config.model.path)
        self.work: StepWork = step_work(config, self.dims.context, prompt=prompt, response=response)
        self.sync_method = sync_method or default_sync_method(config)
        self._held: dict[tuple[str, int, bool, bool], MicroBatchMemory] = {}

    def option(self, split: DeviceSplit, config: RunConfig | None = None) -> PlanOption:
        """This split, with these settings of train instead of the recipe's."""
        config = config or self.config
        engine = self.engine(split.tensor_parallel)
        return PlanOption(
            split,
            self.learner(split.learners, config),
            engine,
            rollout_time(
                self.dims,
                config,
                self.cluster,
                self.work,
                self.weights,
                engines=split.engines,
                tensor_parallel=split.tensor_parallel,
                capacity=max(1, engine.sequences),
            ),
            learning_time(self.dims, config, self.cluster, self.work, split.learners),
            sync_seconds(
                self.dims,
                config,
                self.cluster,
                self.weights,
                split.learners,
                self.sync_method,
                engines=split.engines,
                tensor_parallel=split.tensor_parallel,
            ),
            start_memory(self.dims, config, self.cluster, split.learners),
            checkpoint_cost(self.dims, config, self.cluster, split.learners),
            self.room,
            float("inf") if self.cluster.is_cpu else self.cluster["host_memory"],
            in_process(config),
            config.rollout.overlaps and not in_process(config),
        )

    def engine(self, tensor_parallel: int) -> EngineMemory:
        return engine_memory(
            self.dims, self.config, self.cluster, self.work, self.weights, tensor_parallel
        )

    @cached_property
    def weights(self) -> EngineWeights:
        return engine_weights(self.dims, self.config, self._hf_config)

    def micro_slots(self, ranks: int) -> int:
        """Slots of the fullest micro-batch."""
        return sum(self.work.micro(self.config.train.tokens_per_micro_batch, ranks).slots)

    def learner(self, ranks: int, config: RunConfig) -> LearnerMemory:
        micro = self.work.micro(config.train.tokens_per_micro_batch, ranks)
        rounds = self.work.micro_batches(config.train.tokens_per_micro_batch, ranks)
        per_update = max(1, rounds // config.objective.num_minibatches)
        return learner_memory(
            self.dims,
            config,
            ranks,
            self._held_by(len(micro.slots), config, exact=ranks == per_update == 1),
            slots=sum(micro.slots),
            graphs=rounds if config.train.reuse_scoring_forward else 1,
            first=per_update == 1,
            cpu=self.cluster.is_cpu,
        )

    def _held_by(self, samples: int, config: RunConfig, *, exact: bool) -> MicroBatchMemory:
        """A micro-batch of so many samples. exact: run with its own number, and with the gradients it makes."""
        if exact:
            return self._dry(samples, config, True)
        return self._dry(1, config, False).at(samples, self._dry(2, config, False))

    def _dry(self, samples: int, config: RunConfig, first: bool) -> MicroBatchMemory:
        checkpointing = config.train.activation_checkpointing
        key = (compute_dtype(config), samples, checkpointing, first)
        if key not in self._held:
            micro = MicroBatchShape((self.work.slots,) * samples, (self.work.response,) * samples)
            how = {
                "checkpointing": checkpointing,
                "entropy_graph": config.objective.entropy_coef > 0,
                "first": first,
            }
            self._held[key] = self._model(key[0]).held(micro, **how)
        return self._held[key]

    def _model(self, dtype: str) -> DryRunModel:
        if dtype not in self._models:
            self._models[dtype] = DryRunModel(
                self._hf_config,
                dtype=getattr(torch, dtype),
                cpu=self.cluster.is_cpu,
                fp32_lm_head=self.config.model.lm_head == "float32",
                invariant=self.config.numerics == ON_POLICY,
            )
        return self._models[dtype]

    def splits(
        self,
        learners: int | None = None,
        tensor_parallel: int | None = None,
        engines: int | None = None,
    ) -> list[DeviceSplit]:
        """Those to choose from. A cluster of several nodes is divided by nodes. UsageError if nothing is possible."""
        count, kind = self.cluster.count, self.config.rollout.engine.kind
        ranks = learners or self.config.train.ranks
        if kind in ("hf", "vllm") and tensor_parallel not in (None, 1):
            raise UsageError(
                f"--tensor-parallel: rollout.engine.kind = {kind} has one device; leave it out"
            )
        if in_process(self.config):
            if engines not in (None, 1):
                raise UsageError(
                    f"--engines: {engines}, but there is one, in the learner's process; give cluster.kind=ray"
                )
            most = 1 if kind == "vllm" else count
            if ranks > most:
                raise UsageError(
                    f"--learners: {ranks} of {most} devices this engine's process can have; lower it"
                )
            return [
                DeviceSplit(n, 1, 1)
                for n in ([ranks] if ranks else _counts(most, self.cluster.per_node))
            ]
        if replicated(self.config):
            return self._placed(ranks, engines)
        if count < 2:
            raise UsageError(
                f"--cluster: {self.cluster} has no second device for the server of rollout.engine.kind = "
                f"{kind}; give more, or use hf or vllm, which live in the learner's process"
            )
        if ranks >= count:
            name = "--learners" if learners else "train.ranks"
            raise UsageError(
                f"{name}: {ranks} of {count} devices leave none for an engine; lower it"
            )
        tried = [ranks] if ranks else _counts(count - 1, self.cluster.per_node)
        engines, sizes = engines or 1, (tensor_parallel,) if tensor_parallel else PARALLEL
        found = [
            DeviceSplit(n, engines, size)
            for n in tried
            for size in sizes
            if n + engines * size <= count
        ]
        if not found:
            raise UsageError(
                f"--engines: {engines} of {sizes[0]} devices and {tried[0]} learners are more than {count}; give fewer"
            )
        return found

    def _placed(self, ranks: int, engines: int | None) -> list[DeviceSplit]:
        """What Ray places: the learner's ranks, or the driver that learns alone, and replicas."""
        assert isinstance(self.config.cluster, RayCluster)
        engines = engines or self.config.cluster.replicas
        each, count = devices_per_replica(self.config, cpu=self.cluster.is_cpu), self.cluster.count
        needed = max(1, ranks) + math.ceil(engines * each)
        if needed > count:
            raise UsageError(
                f"--cluster: {self.cluster}, but train.ranks = {ranks} and {engines} replicas of {each:g} need "
                f"{needed} devices; give more, or lower cluster.replicas"
            )
        return [DeviceSplit(max(1, ranks), engines, 1)]

    @property
    def room_share(self) -> float:
        """Of a device's memory that a rank may use."""
        return 1 - self.cluster["learner_reserve"]

    @property
    def room(self) -> float:
        return self.cluster["memory"] * self.room_share


def _refuse_unplanned(config: RunConfig, cluster: Cluster) -> None:
    if config.numerics == ON_POLICY and not cluster.is_cpu:
        raise UsageError(
            f"numerics: {config.numerics} was run on CPUs only, so what its kernels hold and how long they take on "
            f"{cluster.device} is not known; plan it for --cluster 1xcpu, or numerics=fast"
        )


def _counts(most: int, per_node: int) -> list[int]:
    """Numbers of learners to try: any within a node, else whole nodes."""
    return (
        list(range(1, most + 1)) if most <= per_node else list(range(per_node, most + 1, per_node))
    )


def best_option(options: list[PlanOption]) -> PlanOption:
    """The fastest of those that fit; if none does, of those whose learner lacks about the least."""
    fitting = [option for option in options if option.fits]
    if fitting:
        return min(fitting, key=lambda option: option.seconds)
    near = [option for option in options if option.engine_fits] or options
    least = min(option.learner_used for option in near)
    return min(
        (option for option in near if option.learner_used <= 1.1 * least),
        key=lambda option: option.seconds,
    )
