"""The objects of a run, built from its RunConfig.

Every check that needs no weights is done before any weights are loaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from onepolicy.build.engines import (
    BuildEngine,
    build_engine,
    build_evaluator,
    check_engine_capabilities,
)
from onepolicy.build.learner import build_learner, build_reprefill
from onepolicy.build.room import divide_gpu, fit_max_len
from onepolicy.config import (
    CorrectionConfig,
    DuplicateRoutes,
    HFEngineConfig,
    ModelConfig,
    ProgramTask,
    RolloutReplay,
    RunConfig,
    SGLangConfig,
    UsageError,
    VLLMEngineConfig,
    WeightsReplay,
)
from onepolicy.config.input_files import require_gateway, resolve_model
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.envs import make_environment, make_task
from onepolicy.envs.tasks.single_turn import SingleTurn
from onepolicy.interfaces import Environment, Learner, RolloutEngine, WeightTarget
from onepolicy.invariant.numerics_contract import require_same_contract
from onepolicy.models.load import (
    context_length,
    load_tokenizer,
    parse_device,
    read_config,
    read_stops,
)
from onepolicy.models.long_samples import check_long_samples
from onepolicy.models.lora import load_peft
from onepolicy.models.product_check import check_float32_products
from onepolicy.models.quant.quantise import check_kernels
from onepolicy.replay.checks import RouteSpec, refuse_router_loss
from onepolicy.replay.layers import require_moe
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.pressure import check_pressure
from onepolicy.rollout.remote.dialects.sglang_adapters import layer_names as sglang_layer_names
from onepolicy.rollout.spec import EngineSpec
from onepolicy.rollout.vllm.adapter import layer_names
from onepolicy.rollout.vllm.quant import check_quant_device
from onepolicy.train.eight_bit_adamw import check_installed
from onepolicy.train.lora import check_start
from onepolicy.types import Sampling

if TYPE_CHECKING:
    from onepolicy.envs.multiturn.episode import PathOptions
    from onepolicy.train.reprefill import Reprefill
    from onepolicy.train.scorer import PolicyScorer
    from onepolicy.train.sharded.ranks import Ranks


C = TypeVar("C")


def load_tokenizer_and_max_len(
    config: RunConfig, model: ModelConfig, *, trains: bool = False
) -> tuple[PreTrainedTokenizerBase, int]:
    """Return the tokenizer and the longest sequence allowed.

    trains: a learner will be on the device. On a GPU less memory is left to the engine then.
    """
    hf_config = read_config(model)
    context, reserved = context_length(hf_config), 0
    if isinstance(config.rollout.engine, SGLangConfig):
        reserved = SGLangConfig.reserved
    max_len = config.rollout.engine.max_len or context - reserved
    if max_len > context:
        raise UsageError(
            f"rollout.engine.max_len: {max_len} is more than the model's context of {context}; "
            f"give at most {context}"
        )
    if parse_device(config.train.device).type != "cpu":
        max_len = fit_max_len(config, model, context - reserved, trains=trains)
    check_long_samples(model, hf_config, max_len)
    return load_tokenizer(model), max_len


def build_environment(
    config: RunConfig, model: ModelConfig, *, trains: bool = False
) -> tuple[Environment, PreTrainedTokenizerBase, int]:
    """Return the task, the tokenizer and the longest sequence allowed, checked together.

    trains: see `load_tokenizer_and_max_len`.
    """
    tokenizer, max_len = load_tokenizer_and_max_len(config, model, trains=trains)
    path: PathOptions = {"max_len": max_len, "duplicate_routes": duplicate_routes_of(config)}
    environment: Environment
    if isinstance(config.task, ProgramTask):
        environment = _make_programs(config.task, tokenizer, path)
    else:
        environment = make_environment(config.task, tokenizer, **path)
    train_tokens = config.rollout.sampling.max_tokens
    for max_tokens in {train_tokens, config.eval.max_tokens or train_tokens}:
        environment.check(max_tokens=max_tokens, max_len=max_len)
    if config.eval.every:
        environment.held_out(config.eval.problems)  # raises if there are fewer
    return environment, tokenizer, max_len


def _make_programs(
    task: ProgramTask, tokenizer: PreTrainedTokenizerBase, path: PathOptions
) -> Environment:
    """Build the environment of programs, which needs the extra gateway. Raises UsageError."""
    require_gateway("task.kind = program")
    programs = pkgutil.resolve_name("onepolicy.gateway.program_task:Programs")
    environment: Environment = programs(
        task, make_task(task.problems, "task.problems"), tokenizer, **path
    )
    return environment


def duplicate_routes_of(config: RunConfig) -> DuplicateRoutes:
    """Return the rule for tokens that several forwards fed; a mode without routes has none."""
    if isinstance(config.replay, RolloutReplay):
        return config.replay.duplicate_routes
    return "as-sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingComponents:
    """The objects that play episodes."""

    config: RunConfig
    engine: RolloutEngine
    environment: Environment
    sampling: Sampling  # of a training request
    route_spec: RouteSpec | None  # expected form of the engine's routes; None for a dense model
    reprefill: Reprefill | None = None  # records routes for an engine that returns none
    samplers: tuple[WeightTarget, ...]  # engine and reprefill: their weights follow the trainer's


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(SamplingComponents):
    """The objects of a run, built once."""

    learner: Learner
    correction: CorrectionConfig  # the part that is evaluated before the update
    evaluator: RolloutEngine | None = None
    """A clean engine that gets the learner's weights before each evaluation."""


def build_components(
    config: RunConfig,
    weights: Path | None = None,
    ranks: Ranks | None = None,
    engine_builder: BuildEngine | None = None,
) -> tuple[Components, PreTrainedTokenizerBase]:
    """Build the objects of a training run, and its tokenizer.

    weights: a checkpoint folder that replaces model.path (resume, fork).
    ranks: the ranks of a sharded learner.
    engine_builder: factory of the engine that samples; None: `build_engine`.
    """
    if config.optim.state == "8bit":
        check_installed()
    model = model_to_load(config, weights)
    if config.train.lora is not None:
        check_adapters(config.train.lora, config, model)
    check_replayable(config, model)
    environment, tokenizer, max_len = build_environment(config, model, trains=True)
    refuse_distributed(config, ranks, engine_builder)
    check_quant_support(config)
    if ranks is None:
        learner = build_learner(config, model)
    else:
        from onepolicy.build.sharded_learner import build_rank_learner

        learner = build_rank_learner(config, model, ranks)
    scorer = learner.scorer
    build_sampler = engine_builder or build_engine
    engine, route_spec = build_engine_for(
        config, model, max_len, scorer, build_sampler, trains=True
    )
    make = partial(
        Components,
        learner=learner,
        correction=config.correction.fixed_part,
        evaluator=build_evaluator(config, model, scorer.device, max_len),
    )
    components = with_sampling(
        make, config, model, environment, tokenizer, engine, route_spec, scorer
    )
    return components, tokenizer


def model_to_load(config: RunConfig, weights: Path | None) -> ModelConfig:
    """Return the model to load.

    weights: a checkpoint folder that replaces model.path, unless it holds an adapter of it; or
    None. Raises UsageError for an adapter without train.lora, or a whole model with it.
    """
    if weights is None:
        return resolve_model(config.model)
    has_adapter = (weights / "adapter_config.json").is_file()
    if has_adapter or config.train.lora is not None:
        check_start(weights, config.train.lora)
        return resolve_model(config.model)
    return config.model.model_copy(update={"path": str(weights)})


def with_sampling(
    make: Callable[..., C],
    config: RunConfig,
    model: ModelConfig,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    engine: RolloutEngine,
    route_spec: RouteSpec | None,
    scorer: PolicyScorer,
) -> C:
    """Call `make` with the fields of SamplingComponents."""
    top_logprobs = 0
    if not config.rollout.sampling.narrows:  # then the support has the values
        top_logprobs = config.correction.top_logprobs(scorer.vocab_size)
    check_engine_capabilities(config, engine.caps, top_logprobs)
    reprefill = None
    samplers: tuple[WeightTarget, ...] = (engine,)
    if config.uses_reprefill:
        reprefill = build_reprefill(config, model, scorer.device)
        samplers = engine, reprefill
    return make(
        config=config,
        engine=engine,
        environment=environment,
        sampling=sampling_of(config, stop_ids(environment, model, tokenizer), top_logprobs),
        route_spec=route_spec,
        reprefill=reprefill,
        samplers=samplers,
    )


def stop_ids(
    environment: Environment, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Return the token ids that end a completion.

    A turn of a dialogue ends with eos alone: the template writes the rest.
    """
    if isinstance(environment, SingleTurn):
        return read_stops(model, tokenizer)
    return (int(tokenizer.eos_token_id),)


def sampling_of(config: RunConfig, stop: tuple[int, ...], top_logprobs: int) -> Sampling:
    """Return the sampling parameters of a training request.

    stop: token ids that end a completion. top_logprobs: likeliest tokens whose log-probabilities
    the correction needs.
    """
    chosen = config.rollout.sampling
    return Sampling(
        chosen.temperature,
        chosen.max_tokens,
        chosen.top_p,
        chosen.top_k,
        chosen.min_p,
        stop=stop,
        top_logprobs=top_logprobs,
        support=chosen.narrows,
        support_logp=chosen.narrows and config.correction.centering != "none",
    )


def refuse_distributed(
    config: RunConfig, ranks: Ranks | None, engine_builder: BuildEngine | None
) -> None:
    """Raise UsageError for settings that need the processes which `onepolicy train` starts."""
    if config.cluster.kind == "ray" and engine_builder in (None, build_engine):
        raise UsageError(
            "cluster.kind: ray, but only `onepolicy train` places processes; give "
            "cluster.kind=local here"
        )
    if config.train.ranks and ranks is None:
        raise UsageError(
            f"train.ranks: {config.train.ranks}, but only `onepolicy train` spreads the learner "
            "over processes; give train.ranks=0 here"
        )


def build_engine_for(
    config: RunConfig,
    model: ModelConfig,
    max_len: int,
    scorer: PolicyScorer,
    build: BuildEngine,
    *,
    trains: bool,
) -> tuple[RolloutEngine, RouteSpec | None]:
    """Build the engine of this scorer. Return it with the expected form of its routes."""
    route_spec = None
    if scorer.routers:
        route_spec = route_spec_of(config, scorer.routers)
    returned_routes = route_spec
    if config.uses_reprefill:
        returned_routes = None
    spec = EngineSpec(
        model,
        config.rollout.engine,
        scorer.device,
        max_len,
        route_spec=returned_routes,
        combine_weights=isinstance(config.replay, WeightsReplay),
        numerics=config.numerics,
        quant=config.rollout.quant,
        lora=native_lora(config),
        pressure=config.rollout.pressure,
        beside_learner=trains and config.rollout.max_staleness is not None,
    )
    on_gpu = scorer.device.type != "cpu"
    if on_gpu:
        spec = divide_gpu(spec, config, trains=trains)
    engine = build(spec)
    if on_gpu:
        in_float32 = config.model.dtype == "float32" and config.train.autocast == "off"
        check_float32_products(scorer.device, needed=in_float32)
    if config.numerics == ON_POLICY:
        assert engine.caps.contract is not None
        require_same_contract(engine.caps.contract, scorer.contract)
    return engine, route_spec


def native_lora(config: RunConfig) -> LoraConfig | None:
    """Return the adapters that the engine itself computes with."""
    lora = config.train.lora
    return lora if lora is not None and lora.sync == "native" else None


def check_replayable(config: RunConfig, model: ModelConfig) -> None:
    """Raise UsageError if this model cannot be replayed, or not be put under pressure."""
    hf_config = read_config(model)
    if config.rollout.pressure is not None:
        check_pressure(config.rollout.pressure, hf_config)
    if config.replay.mode != "off":
        require_moe(hf_config, config.replay.mode)
    refuse_router_loss(hf_config)


def check_adapters(lora: LoraConfig, config: RunConfig, model: ModelConfig) -> None:
    """Raise UsageError for adapters that cannot be trained here, or that the engine cannot use."""
    load_peft()
    if lora.base == "nf4":
        import onepolicy.models.nf4  # noqa: F401  # raises UsageError without bitsandbytes
    if lora.sync == "native" and config.rollout.engine.kind in ("vllm", "vllm-server"):
        layer_names(lora, model)
    if lora.sync == "native" and config.rollout.engine.kind == "sglang":
        sglang_layer_names(lora, model)


def check_quant_support(config: RunConfig) -> None:
    """Raise UsageError if the engine cannot run rollout.quant on this machine."""
    quant, device = config.rollout.quant, parse_device(config.train.device)
    if quant is None:
        return
    if isinstance(config.rollout.engine, HFEngineConfig):
        check_kernels(quant, device)
    if isinstance(config.rollout.engine, VLLMEngineConfig):
        check_quant_device(quant, cpu=device.type == "cpu")


def route_spec_of(config: RunConfig, routers: Routers) -> RouteSpec:
    """Return the expected form of a run's routes."""
    missing: Literal["error", "native", "fine"] = "fine"
    if isinstance(config.replay, RolloutReplay) and config.replay.source == "engine":
        missing = config.replay.missing
    return RouteSpec(routers.layers, routers.num_experts, routers.top_k, missing)
