"""Rules of options: what on-policy numerics, pressure, staleness and adapters contradict.

A run without such an option does not load this file.
"""

from __future__ import annotations

from onepolicy.config.cluster import ClusterConfig, RayCluster
from onepolicy.config.engine import HFEngineConfig, SGLangConfig, VLLMEngineConfig
from onepolicy.config.lora import LoraConfig
from onepolicy.config.model import ModelConfig, TrainConfig
from onepolicy.config.numerics import ON_POLICY, Numerics
from onepolicy.config.pressure import RoutingPressure
from onepolicy.config.replay import ReplayConfig, RolloutReplay
from onepolicy.config.rollout import RolloutConfig
from onepolicy.config.sections import Sections


def check_options(run: Sections) -> None:
    """Raise ValueError for the first setting that contradicts an option of this run."""
    if run.numerics == ON_POLICY:
        _check_on_policy_engine(run.model, run.rollout)
        _check_on_policy_trainer(run.train, run.replay)
    if run.rollout.pressure is not None:
        _check_pressure(run.rollout.pressure, run)
    if run.rollout.overlaps:
        _check_stale_engine(run.rollout, run.cluster)
        _check_stale_routes(run.rollout, run.replay, run.numerics)
    if run.train.lora is not None:
        _check_lora(run.train.lora, run)
    if isinstance(run.rollout.engine, VLLMEngineConfig):
        _check_tensor_parallel(run.rollout.engine.tensor_parallel_size, run.cluster)


def _check_on_policy_engine(model: ModelConfig, rollout: RolloutConfig) -> None:
    """Refuse an engine that cannot equal the trainer to the bit."""
    engine = rollout.engine
    if not isinstance(engine, HFEngineConfig):
        raise ValueError(
            f"rollout.engine.kind: {engine.kind}, but with numerics = on-policy engine and trainer "
            "compute with the same kernels, which only the embedded engine shares with it; use hf, "
            "or numerics = fast with replay.mode = r3 (docs/on_policy.md says how near vLLM comes)"
        )
    for name in ("dtype", "lm_head"):
        of_engine, of_model = getattr(engine, name), getattr(model, name)
        if of_engine != of_model:
            raise ValueError(
                f"rollout.engine.{name}: {of_engine} and model.{name}: {of_model}, but numerics = "
                f"on-policy needs the same on both sides; leave rollout.engine.{name} out, it then "
                f"follows model.{name}"
            )
    if rollout.quant is not None:
        raise ValueError(
            f"rollout.quant: {rollout.quant.format}, but with numerics = on-policy engine and "
            "trainer compute with the same weights; leave one out"
        )


def _check_on_policy_trainer(train: TrainConfig, replay: ReplayConfig) -> None:
    if train.autocast != "off":
        raise ValueError(
            f"train.autocast: {train.autocast}, but with numerics = on-policy the trainer computes "
            "on the parameters as they are; set it to off (model.dtype = bfloat16 trains bfloat16 "
            "with float32 masters)"
        )
    if isinstance(replay, RolloutReplay) and replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill is for engines that return no routes; with numerics = "
            "on-policy the embedded engine's own are exact, set it to engine"
        )


def _check_pressure(pressure: RoutingPressure, run: Sections) -> None:
    """Refuse settings under which an engine cannot be pressed, or its routes not be used."""
    name, rollout, replay = f"rollout.pressure: {pressure.kind}", run.rollout, run.replay
    if not isinstance(rollout.engine, HFEngineConfig):
        raise ValueError(
            f"{name} is pressure on the routers of the embedded engine, but rollout.engine.kind = "
            f"{rollout.engine.kind}; use hf, or leave it out"
        )
    if isinstance(run.cluster, RayCluster):
        raise ValueError(
            f"{name} is for an engine in this process; set cluster.kind = local, or leave it out"
        )
    if run.numerics == ON_POLICY:
        raise ValueError(
            f"{name} makes engine and trainer differ, but with numerics = on-policy they are equal "
            "to the bit; leave it out, or set numerics to fast"
        )
    if rollout.quant is not None:
        raise ValueError(
            f"{name} on an engine of rollout.quant = {rollout.quant.format} would mix two gaps; "
            "leave one out"
        )
    if not isinstance(replay, RolloutReplay):
        return
    if replay.source == "reprefill":
        raise ValueError(
            f"{name}, but replay.source = reprefill records the routes of a copy without it; set "
            "replay.source to engine"
        )
    if replay.min_agreement:
        raise ValueError(
            f"replay.min_agreement: {replay.min_agreement} refuses routes that the trainer would "
            "not choose, and rollout.pressure makes such routes on purpose; set it to 0"
        )


def _check_stale_engine(rollout: RolloutConfig, cluster: ClusterConfig) -> None:
    if rollout.engine.kind == "vllm":
        kinds = {"ray": "hf", "local": "vllm-server"}
        raise ValueError(
            "rollout.max_staleness: an engine of kind vllm takes weights only between requests, so "
            "that nothing could be sampled over an update; use rollout.engine.kind = "
            f"{kinds[cluster.kind]}"
        )


def _check_stale_routes(rollout: RolloutConfig, replay: ReplayConfig, numerics: Numerics) -> None:
    """Refuse settings that need the weights that sampled, which the trainer no longer has."""
    stale, fix = rollout.max_staleness, "set rollout.max_staleness to 0 or off"
    if numerics == ON_POLICY:
        raise ValueError(
            f"rollout.max_staleness: {stale} trains on tokens of older weights, which cannot have "
            f"the newest ones' log-probabilities to the bit, as numerics = on-policy asks; {fix}, "
            "or numerics to fast"
        )
    if isinstance(replay, RolloutReplay) and replay.source == "reprefill":
        raise ValueError(
            "replay.source: reprefill records routes when a step's samples are complete, with "
            f"other weights than sampled them where rollout.max_staleness = {stale}; set it to "
            f"engine, or {fix}"
        )


def _check_tensor_parallel(size: int, cluster: ClusterConfig) -> None:
    if size == 1:
        return
    name = f"rollout.engine.tensor_parallel_size: {size}"
    if not isinstance(cluster, RayCluster):
        raise ValueError(
            f"{name}, but an engine in the learner's process has that one device; set cluster.kind "
            "= ray, or start a server (onepolicy engine serve) and use kind = vllm-server"
        )
    if cluster.gpus_per_replica not in (None, 0, size):
        raise ValueError(
            f"cluster.gpus_per_replica: {cluster.gpus_per_replica:g}, but {name} takes {size} "
            "GPUs; leave cluster.gpus_per_replica out"
        )


def _check_lora(lora: LoraConfig, run: Sections) -> None:
    """Refuse settings that adapters do not go with."""
    engine = run.rollout.engine
    if run.numerics == ON_POLICY:
        raise ValueError(
            "train.lora: the trainer adds B A x to W x and the engine multiplies by W + B A, which "
            "numerics = on-policy forbids; set numerics to fast, or leave it out"
        )
    if run.objective.has_critic:
        raise ValueError(
            "train.lora: a critic is trained whole, with as much memory as full training; choose "
            "an objective without one, or leave it out"
        )
    if run.optim.state != "device":
        raise ValueError(
            f"optim.state: {run.optim.state} is for the state of whole models; that of adapters "
            "is small, so leave it out beside train.lora"
        )
    if lora.base == "nf4":
        _check_nf4(lora, run)
    if lora.sync == "native":
        _check_native_sync(lora, run)
    if run.cluster.kind == "ray" and engine.kind != "hf":
        raise ValueError(
            f"train.lora: under cluster.kind = ray only rollout.engine.kind = hf was run with "
            f"adapters, not {engine.kind}; use hf, or cluster.kind = local"
        )


def _check_nf4(lora: LoraConfig, run: Sections) -> None:
    """Refuse settings that frozen weights in 4 bits do not go with."""
    name, fix = "train.lora.base: nf4", "leave it out, and the frozen weights keep model.dtype"
    if lora.sync == "native":
        raise ValueError(
            f"{name} with train.lora.sync = native: the engine would add A and B to the weights "
            "that it loaded, which are not the trainer's dequantised ones; use train.lora.sync = "
            "merged"
        )
    if run.train.ranks:
        raise ValueError(
            f"{name} is not sharded over train.ranks = {run.train.ranks}; set train.ranks to 0, "
            f"or {fix}"
        )
    if run.cluster.kind == "ray":
        raise ValueError(f"{name} was not run under cluster.kind = ray; use local, or {fix}")


def _check_native_sync(lora: LoraConfig, run: Sections) -> None:
    """Refuse an engine that cannot compute with A and B of these targets."""
    kind, fix = run.rollout.engine.kind, "use train.lora.sync = merged"
    if isinstance(run.cluster, RayCluster):
        raise ValueError(f"train.lora.sync: native is not sent to replicas of Ray; {fix}")
    if run.rollout.quant is not None:
        raise ValueError(
            "train.lora.sync: native computes with the frozen weights as the engine started with "
            f"them, but rollout.quant makes them anew at every sync; {fix}"
        )
    if run.replay.mode != "off" and getattr(run.replay, "source", None) == "reprefill":
        raise ValueError(
            "train.lora.sync: native, but replay.source = reprefill pushes whole weights to its "
            f"copy; {fix}"
        )
    engine = run.rollout.engine
    if isinstance(engine, SGLangConfig) and engine.pause != "abort":
        raise ValueError(
            f"train.lora.sync: native, but with rollout.engine.pause = {engine.pause} a request "
            "keeps the adapter that it began with, and SGLang waits for it before it unloads that; "
            f"set rollout.engine.pause to abort, or {fix}"
        )
    if kind in ("vllm-server", "sglang") and run.train.ranks:
        raise ValueError(
            "train.lora.sync: native to a server was never run with train.ranks = "
            f"{run.train.ranks}; {fix}"
        )
    if kind != "hf" and lora.targets is not None:
        wrong = [each for each in lora.targets if each in ("experts", "routers")]
        if wrong:
            raise ValueError(
                f"train.lora.sync: native, but rollout.engine.kind = {kind} cannot compute with "
                f"adapters of {' and '.join(wrong)}; {fix}, or drop them from train.lora.targets"
            )
