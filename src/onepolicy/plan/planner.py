"""The plan of a recipe on a cluster: memory per device, seconds per step, and the best split."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from onepolicy.build.gpu_defaults import with_gpu_precision
from onepolicy.build.room import engine_sleeps
from onepolicy.config import HFEngineConfig, ModelConfig, RunConfig, UsageError
from onepolicy.config.numerics import ON_POLICY
from onepolicy.models.decode_attention import KEY_BLOCK
from onepolicy.models.load import foreign_files
from onepolicy.plan.dims import Dims, read_dims, read_hf_config
from onepolicy.plan.engine_memory import (
    EngineMemory,
    EngineWeights,
    engine_memory,
    engine_weights,
    evaluator_bytes,
)
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.learner_memory import (
    CheckpointCost,
    LearnerMemory,
    StartMemory,
    checkpoint_cost,
    learner_memory,
    start_memory,
)
from onepolicy.plan.splits import DeviceSplit, possible_splits
from onepolicy.plan.step_work import StepWork, in_process, step_work
from onepolicy.plan.times import (
    LearningTime,
    RolloutTime,
    default_sync_method,
    learning_time,
    rollout_time,
    sync_seconds,
)
from onepolicy.train.dry_run import (
    DryRunModel,
    MicroBatchMemory,
    MicroBatchShape,
    compute_dtype,
)
from onepolicy.train.forward import logits_chunk
from onepolicy.train.memory import OptimiserMemory, rank_state, with_adapters


@dataclass(frozen=True, slots=True)
class PlanOption:
    """A split with its memory and its times."""

    split: DeviceSplit
    learner: LearnerMemory
    engine: EngineMemory
    rollout: RolloutTime
    learning: LearningTime
    sync: float
    start: StartMemory
    save: CheckpointCost
    state: OptimiserMemory  # of a rank
    host_state: float  # bytes of a node's own memory in which moments and masters rest
    learner_room: float  # bytes that a rank may use
    host_room: float  # bytes of a node's own memory
    engine_on_learner: bool
    # rollout.max_staleness lets sampling and learning run at once, each on its own devices
    overlaps: bool
    sleeps: bool = False  # the engine's memory is free while the learner works

    @property
    def learner_used(self) -> float:
        """Most bytes on a learner's device."""
        used, engine = self.learner.total, self.engine.weights + self.engine.cache
        if self.sleeps:
            used = max(used, self.learner.kept + engine)
        elif self.engine_on_learner:
            used += engine
        return max(used + self.engine.evaluator, self.start.device)

    @property
    def learner_fits(self) -> bool:
        return self.learner_used <= self.learner_room

    @property
    def host_used(self) -> float:
        """Most bytes of a node's own memory: at the start, or while a checkpoint is written."""
        return max(self.start.host, self.host_state + self.save.staged)

    @property
    def host_fits(self) -> bool:
        return self.host_used <= self.host_room

    @property
    def engine_fits(self) -> bool:
        used = self.engine.weights + self.engine.cache
        return self.engine.sequences >= 1 and used <= self.engine.room

    @property
    def fits(self) -> bool:
        return self.learner_fits and self.engine_fits and self.host_fits

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase of a step, in order."""
        return {
            "rollout: prefill": self.rollout.prefill,
            "rollout: decode": self.rollout.decode,
            "score": self.learning.score,
            "update": self.learning.update,
            "sync": self.sync,
        }

    @property
    def seconds(self) -> float:
        if self.overlaps:
            return self.overlapped
        return sum(self.phase_seconds.values())

    @property
    def overlapped(self) -> float:
        """Seconds of a step that samples while it learns: the longer of the two, and the sync."""
        return max(self.rollout.seconds, self.learning.score + self.learning.update) + self.sync

    @property
    def bottleneck(self) -> str:
        """The longest phase and its cause."""
        phases = self.phase_seconds
        name = max(phases, key=lambda phase: phases[phase])
        if name == "rollout: decode":
            return f"{name}: {self.rollout.step.bound}"
        if name in ("score", "update"):
            return f"{name}: {self.learning.bound}"
        return name


class Planner:
    """A recipe on a cluster. Dry runs are made when they are needed and cached."""

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
        """Build the model of fake tensors and compute the work of a step.

        model: config.model with its path resolved. prompt, response: tokens; see `step_work`.
        sync_method: None means the engine's own.
        """
        _check_plannable(config, cluster)
        self.config, self.cluster = config, cluster
        self._asked: dict[str, Any] = {
            "prompt": prompt,
            "response": response,
            "sync_method": sync_method,
        }
        self._model_config = model
        self._hf_config = read_hf_config(model)
        # by the dtype of the layers' computation, and train.logits_chunk
        self._models: dict[tuple[str, int | None], DryRunModel] = {}
        settled = self.settings_of(cluster.count)
        with foreign_files("the config", model, limited=False):
            dry = DryRunModel.of(settled, self._hf_config, cpu=cluster.is_cpu)
            self.dims: Dims = read_dims(dry.model, config.model.path)
        if config.train.lora is not None:
            self.dims = with_adapters(self.dims, dry.model, config.train.lora)
            dry.add_adapters(config.train.lora)
        self._models[_model_key(settled)] = dry
        self.work: StepWork = step_work(config, self.dims.context, prompt=prompt, response=response)
        self.sync_method = sync_method or default_sync_method(config)

    def possible_splits(
        self,
        learners: int | None = None,
        tensor_parallel: int | None = None,
        engines: int | None = None,
    ) -> list[DeviceSplit]:
        """Return the splits to choose from. See `possible_splits`."""
        return possible_splits(self.config, self.cluster, learners, tensor_parallel, engines)

    def evaluate_split(self, split: DeviceSplit, config: RunConfig | None = None) -> PlanOption:
        """Compute memory and times of a split. config: settings to use instead of the recipe's."""
        config = config or self.settings_of(split.learners)
        dims, cluster, work, learners = self.dims, self.cluster, self.work, split.learners
        learner = self.learner_rank_memory(learners, config)
        cpu = cluster.is_cpu
        sleeps = not cpu and engine_sleeps(config, torch.device("cuda"))
        share: float | None = None
        if in_process(config):
            held = learner.kept if sleeps else learner.total
            room = self.room - held - evaluator_bytes(dims, config, cluster)
            share = cluster["engine_share"] * max(0.0, room) / cluster["memory"]
        engine = self.engine_device_memory(split.tensor_parallel, share, config)
        state = rank_state(dims, config, learners, cpu=cpu, one_memory=cpu).optimiser
        policies = 1 + config.objective.has_critic
        engine_devices = {"engines": split.engines, "tensor_parallel": split.tensor_parallel}
        return PlanOption(
            split=split,
            learner=learner,
            engine=engine,
            rollout=rollout_time(
                dims,
                config,
                cluster,
                work,
                self.weights,
                capacity=max(1, engine.sequences),
                **engine_devices,
            ),
            learning=learning_time(
                dims,
                config,
                cluster,
                work,
                learners,
                chunked=self._chunked(learners, config),
                moved=policies * state.moved,
            ),
            sync=sync_seconds(
                dims, config, cluster, self.weights, learners, self.sync_method, **engine_devices
            ),
            start=start_memory(dims, config, cluster, learners),
            save=checkpoint_cost(dims, config, cluster, learners),
            state=state,
            host_state=policies * state.host * min(learners, cluster.per_node),
            learner_room=self.room,
            host_room=self.host_room,
            engine_on_learner=in_process(config),
            overlaps=config.rollout.overlaps and not in_process(config),
            sleeps=sleeps,
        )

    def settings_of(
        self,
        learners: int,
        config: RunConfig | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> RunConfig:
        """Return the recipe with what a run of these learner ranks settles on a GPU.

        config: a changed recipe. note: gets a line that says so.
        """
        config = config or self.config
        if self.cluster.is_cpu:
            return config
        return with_gpu_precision(config, note, ranks=learners > 1 or bool(config.train.ranks))

    def fitting_max_len(self, option: PlanOption) -> int | None:
        """Return the longest sequence with which a split fits that does not fit the whole context.

        A run on a GPU chooses about this length for the embedded engine if none is set (build/
        room.py). None in all other cases, and if it would cut off the planned sequences.
        """
        engine = self.config.rollout.engine
        unset = isinstance(engine, HFEngineConfig) and engine.max_len is None
        if option.fits or not unset or self.cluster.is_cpu or not in_process(self.config):
            return None
        config = self.settings_of(option.split.learners)

        def fits(blocks: int) -> bool:
            settled = with_max_len(config, blocks * KEY_BLOCK)
            return self.evaluate_split(option.split, settled).fits

        shortest = math.ceil(self.work.length / KEY_BLOCK)
        blocks = range(shortest, self.dims.context // KEY_BLOCK + 1)
        fitting = bisect_left(blocks, True, key=lambda each: not fits(each))
        if not fitting:
            return None
        return blocks[fitting - 1] * KEY_BLOCK

    def replanned(self, config: RunConfig) -> Planner:
        """Return a planner of another recipe for the same model, cluster and lengths."""
        return Planner(config, self._model_config, self.cluster, **self._asked)

    def engine_device_memory(
        self, tensor_parallel: int, share: float | None = None, config: RunConfig | None = None
    ) -> EngineMemory:
        """Compute the memory of an engine's device. share: what a learner on it leaves."""
        return engine_memory(
            self.dims,
            config or self.config,
            self.cluster,
            self.work,
            self.weights,
            tensor_parallel,
            share,
        )

    @cached_property
    def weights(self) -> EngineWeights:
        return engine_weights(self.dims, self.config, self._hf_config)

    def micro_batch_slots(self, ranks: int) -> int:
        """Return the slots of the fullest micro-batch."""
        budget = self.config.train.tokens_per_micro_batch
        return sum(self.work.fullest_micro_batch(budget, ranks).slots)

    def learner_rank_memory(self, ranks: int, config: RunConfig) -> LearnerMemory:
        """Compute the memory of one of `ranks` learner ranks."""
        budget = config.train.tokens_per_micro_batch
        fullest = self.work.fullest_micro_batch(budget, ranks)
        micro_batches = self.work.micro_batches(budget, ranks)
        per_update = max(1, micro_batches // config.objective.num_minibatches)
        # With one rank and one micro-batch per update, the dry run is the update itself.
        exact = ranks == per_update == 1
        graphs = 1
        if micro_batches <= config.most_reused_forwards:
            graphs = micro_batches
        return learner_memory(
            self.dims,
            config,
            ranks,
            self._micro_batch_memory(len(fullest.slots), config, exact=exact),
            slots=sum(fullest.slots),
            graphs=graphs,
            first=per_update == 1,
            cpu=self.cluster.is_cpu,
            one_memory=self.cluster.is_cpu,
        )

    def _micro_batch_memory(
        self, samples: int, config: RunConfig, *, exact: bool
    ) -> MicroBatchMemory:
        """Return the memory of a micro-batch of `samples` samples.

        exact: run it with all samples and with the gradients it makes; else extrapolate from one
        and two samples. Logits in chunks do not grow with the samples once a chunk is full, so
        then extrapolate from as many samples as fill it, and one more.
        """
        if exact:
            return self._dry_run(samples, config, first=True)
        first, chunk = 1, self._logits_chunk(config)
        if 0 < chunk < samples * self.work.response:
            first = math.ceil(chunk / self.work.response)
        few, more = (self._dry_run(count, config, first=False) for count in (first, first + 1))
        return few.for_samples(samples, more, first=first)

    def _logits_chunk(self, config: RunConfig) -> int:
        """Return the slots whose logits exist at once, 0 for all of a micro-batch."""
        return logits_chunk(self._model(config).model)

    def _chunked(self, ranks: int, config: RunConfig) -> bool:
        """Return whether the fullest micro-batch computes its logits in chunks."""
        fullest = self.work.fullest_micro_batch(config.train.tokens_per_micro_batch, ranks)
        return 0 < self._logits_chunk(config) < sum(fullest.trainable)

    def _dry_run(self, samples: int, config: RunConfig, *, first: bool) -> MicroBatchMemory:
        micro = MicroBatchShape((self.work.slots,) * samples, (self.work.response,) * samples)
        with foreign_files("the config", self._model_config, limited=False):
            return self._model(config).micro_batch_memory(  # which keeps its runs
                micro,
                checkpointing=config.train.activation_checkpointing,
                entropy_graph=config.objective.entropy_coef > 0,
                first=first,
            )

    def _model(self, config: RunConfig) -> DryRunModel:
        key = _model_key(config)
        if key not in self._models:
            dry = DryRunModel.of(config, self._hf_config, cpu=self.cluster.is_cpu)
            self._models[key] = dry
            if self.config.train.lora is not None:
                dry.add_adapters(self.config.train.lora)
        return self._models[key]

    @property
    def room_share(self) -> float:
        """Share of a device's memory that a rank may use."""
        return 1 - self.cluster["learner_reserve"]

    @property
    def room(self) -> float:
        """Bytes of a device that a rank may use."""
        return self.cluster["memory"] * self.room_share

    @property
    def host_room(self) -> float:
        """Bytes of a node's own memory; inf for a cluster of CPUs."""
        if self.cluster.is_cpu:
            return math.inf
        return self.cluster["host_memory"]


def with_max_len(config: RunConfig, max_len: int) -> RunConfig:
    """Return the settings with another rollout.engine.max_len."""
    engine = config.rollout.engine.model_copy(update={"max_len": max_len})
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout})


def _model_key(config: RunConfig) -> tuple[str, int | None]:
    return compute_dtype(config), config.train.logits_chunk


def _check_plannable(config: RunConfig, cluster: Cluster) -> None:
    if config.numerics == ON_POLICY and not cluster.is_cpu:
        raise UsageError(
            f"numerics: the time and memory of {config.numerics} on a GPU ({cluster.device}) are "
            "not modelled; plan it for --cluster 1xcpu, or numerics=fast"
        )


def best_option(options: list[PlanOption]) -> PlanOption:
    """Return the fastest option that fits.

    If none fits, return the fastest of those whose learner needs at most 10% more memory than the
    smallest does.
    """
    fitting = [option for option in options if option.fits]
    if fitting:
        return min(fitting, key=lambda option: option.seconds)
    near = [option for option in options if option.engine_fits] or options
    least = min(option.learner_used for option in near)
    small = [option for option in near if option.learner_used <= 1.1 * least]
    return min(small, key=lambda option: option.seconds)
