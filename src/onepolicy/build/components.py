"""RunConfig -> the parts of a run. Every check that needs no weights comes before any weights are loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from onepolicy.build.engines import BuildEngine, build_engine, check_engine_capabilities
from onepolicy.build.learner import build_learner, build_scorer, resolve_model
from onepolicy.config import (
    FromRollout,
    HFEngineConfig,
    ModelConfig,
    RunConfig,
    SGLangConfig,
    UsageError,
    VLLMEngineConfig,
    WeightsReplay,
)
from onepolicy.config.numerics import ON_POLICY
from onepolicy.envs import make_environment
from onepolicy.interfaces import Environment, Learner, RolloutEngine, WeightTarget
from onepolicy.invariant.numerics_contract import require_same_contract
from onepolicy.models.load import (
    context_length,
    load_tokenizer,
    parse_device,
    read_config,
)
from onepolicy.replay.checks import RouteSpec, refuse_router_loss, require_moe
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.rollout.spec import EngineSpec
from onepolicy.train.scorer import PolicyScorer

if TYPE_CHECKING:
    from onepolicy.train.reprefill import Reprefill
    from onepolicy.train.sharded.learner import ShardedScorer
    from onepolicy.train.sharded.rank_group import DistributedContext


C = TypeVar("C")


def load_tokenizer_and_max_len(
    config: RunConfig, model: ModelConfig
) -> tuple[PreTrainedTokenizerBase, int]:
    """Tokenizer, and the longest sequence allowed."""
    context = context_length(read_config(model))
    reserved = SGLangConfig.reserved if isinstance(config.rollout.engine, SGLangConfig) else 0
    max_len = config.rollout.engine.max_len or context - reserved
    if max_len > context:
        raise UsageError(
            f"rollout.engine.max_len: {max_len} is more than the model's context of {context}"
        )
    return load_tokenizer(model), max_len


def build_environment(
    config: RunConfig, model: ModelConfig
) -> tuple[Environment, PreTrainedTokenizerBase, int]:
    """Tokenizer, task and the longest sequence allowed, all checked against each other."""
    tokenizer, max_len = load_tokenizer_and_max_len(config, model)
    rows = (
        config.replay.duplicate_routes if isinstance(config.replay, FromRollout) else "as-sampled"
    )
    environment = make_environment(config.task, tokenizer, max_len=max_len, duplicate_routes=rows)
    for max_tokens in {
        config.rollout.sampling.max_tokens,
        config.eval.max_tokens or config.rollout.sampling.max_tokens,
    }:
        environment.check(max_tokens=max_tokens, max_len=max_len)
    if config.eval.every:
        environment.held_out(config.eval.problems)  # are there that many?
    return environment, tokenizer, max_len


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingComponents:
    """What episodes are played with."""

    config: RunConfig
    engine: RolloutEngine
    environment: Environment
    stop: tuple[int, ...]  # token ids that end a completion
    routes: RouteSpec | None  # what the engine's routes must be; None for a dense model
    reprefill: Reprefill | None = None  # records routes for an engine that returns none
    top_logprobs: int = 0  # of the rollout's likeliest tokens, that the correction needs

    @property
    def samplers(self) -> list[WeightTarget]:
        """Everything that has to follow the trainer's weights."""
        return [self.engine] if self.reprefill is None else [self.engine, self.reprefill]


@dataclass(frozen=True, slots=True, kw_only=True)
class Components(SamplingComponents):
    """The objects of a run, built once."""

    learner: Learner
    evaluator: RolloutEngine | None = (
        None  # unquantised; given the learner's weights before each evaluation
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureComponents(SamplingComponents):
    """The objects of `onepolicy measure`: no optimiser."""

    scorer: PolicyScorer


@dataclass(frozen=True, slots=True)
class EngineAndScorer:
    """The engine that samples and the scorer of the trainer."""

    config: RunConfig
    engine: RolloutEngine
    scorer: PolicyScorer
    routes: RouteSpec | None  # what the engine's routes must be; None for a dense model


def build_components(
    config: RunConfig,
    weights: Path | None = None,
    ranks: DistributedContext | None = None,
    engine_builder: BuildEngine | None = None,
) -> tuple[Components, PreTrainedTokenizerBase]:
    """`weights`: a checkpoint folder to load instead of model.path (resume, fork). ranks: of a sharded learner.

    engine_builder: of the engine that samples; None: `build_engine`.
    """
    _check_extras(config)
    model = (
        resolve_model(config.model)
        if weights is None
        else config.model.model_copy(update={"path": str(weights)})
    )
    check_replayable(config, model)
    environment, tokenizer, max_len = build_environment(config, model)
    _refuse_distributed(config, ranks, engine_builder)
    check_quant_support(config)
    learner = build_learner(config, model, ranks)
    engine, routes = _build_engine_for(
        config, model, max_len, learner.scorer, engine_builder or build_engine
    )
    evaluator = build_evaluator(config, model, learner.scorer.device, max_len)
    make = partial(Components, learner=learner, evaluator=evaluator)
    return _with_sampling(
        make, config, model, environment, tokenizer, engine, routes, learner.scorer
    ), tokenizer


def build_measure_components(
    config: RunConfig,
) -> tuple[MeasureComponents, PreTrainedTokenizerBase]:
    """The same in this process, without anything that only an update needs."""
    model = resolve_model(config.model)
    check_replayable(config, model)
    environment, tokenizer, max_len = build_environment(config, model)
    pair = build_engine_and_scorer(config, model, max_len)
    make = partial(MeasureComponents, scorer=pair.scorer)
    return _with_sampling(
        make, config, model, environment, tokenizer, pair.engine, pair.routes, pair.scorer
    ), tokenizer


def _with_sampling(
    make: Callable[..., C],
    config: RunConfig,
    model: ModelConfig,
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    engine: RolloutEngine,
    routes: RouteSpec | None,
    scorer: PolicyScorer | ShardedScorer,
) -> C:
    """Call `make` with the fields of SamplingComponents."""
    top_logprobs = config.correction.top_logprobs(scorer.vocabulary)
    check_engine_capabilities(config, engine.caps, top_logprobs)
    return make(
        config=config,
        engine=engine,
        environment=environment,
        stop=(tokenizer.eos_token_id,),
        routes=routes,
        reprefill=build_reprefill(config, model, scorer.device) if uses_reprefill(config) else None,
        top_logprobs=top_logprobs,
    )


def build_reprefill(config: RunConfig, model: ModelConfig, device: torch.device) -> Reprefill:
    """A second copy of the model, in the engine's dtype, that records routes."""
    from onepolicy.train.reprefill import Reprefill

    second = load_engine_copy(model, config.rollout, device)
    scorer = PolicyScorer(second.eval(), config, routers=bind_routers(second))
    combine = isinstance(config.replay, WeightsReplay)
    return Reprefill(scorer, tokens=config.train.tokens_per_micro_batch, weights=combine)


def build_evaluator(
    config: RunConfig, model: ModelConfig, device: torch.device, max_len: int
) -> RolloutEngine | None:
    """An embedded engine with unquantised weights, if evaluations need one."""
    if config.rollout.quant is None or config.eval.quantised or not config.eval.every:
        return None
    return build_unquantised_engine(config, model, device, max_len)


def build_unquantised_engine(
    config: RunConfig, model: ModelConfig, device: torch.device, max_len: int
) -> RolloutEngine:
    """An embedded engine with the settings of the run's engine, but for rollout.quant."""
    engine = config.rollout.engine
    own = HFEngineConfig(
        dtype=engine.dtype,
        lm_head=engine.lm_head,
        max_num_seqs=engine.max_num_seqs,
        max_len=engine.max_len,
    )
    return build_engine(EngineSpec(model, own, device, max_len))


def build_engine_and_scorer(config: RunConfig, model: ModelConfig, max_len: int) -> EngineAndScorer:
    """Both with the weights of `model`, in this process."""
    _refuse_distributed(config, None, None)
    check_quant_support(config)
    scorer = build_scorer(config, model)
    engine, routes = _build_engine_for(config, model, max_len, scorer, build_engine)
    return EngineAndScorer(config, engine, scorer, routes)


def _refuse_distributed(
    config: RunConfig, ranks: DistributedContext | None, engine_builder: BuildEngine | None
) -> None:
    """UsageError for settings that only `onepolicy train` can follow: it starts the processes."""
    if config.cluster.kind == "ray" and engine_builder in (None, build_engine):
        raise UsageError(
            "cluster.kind: ray, but only `onepolicy train` places processes; give cluster.kind=local here"
        )
    if config.train.ranks and ranks is None:
        raise UsageError(
            f"train.ranks: {config.train.ranks}, but only `onepolicy train` spreads the learner over processes; give "
            "train.ranks=0 here"
        )


def _build_engine_for(
    config: RunConfig,
    model: ModelConfig,
    max_len: int,
    scorer: PolicyScorer | ShardedScorer,
    build: BuildEngine,
) -> tuple[RolloutEngine, RouteSpec | None]:
    """The engine beside this scorer, and what its routes must be."""
    rules = route_rules(config, scorer.routers) if scorer.routers else None
    spec = EngineSpec(
        model,
        config.rollout.engine,
        scorer.device,
        max_len,
        route_spec=None if uses_reprefill(config) else rules,
        combine_weights=isinstance(config.replay, WeightsReplay),
        numerics=config.numerics,
        quant=config.rollout.quant,
    )
    engine = build(spec)
    if config.numerics == ON_POLICY:
        assert engine.caps.contract is not None
        require_same_contract(engine.caps.contract, scorer.contract)
    return engine, rules


def check_replayable(config: RunConfig, model: ModelConfig) -> None:
    hf_config = read_config(model)
    if config.replay.mode != "off":
        require_moe(hf_config, config.replay.mode)
    refuse_router_loss(hf_config)


def check_quant_support(config: RunConfig) -> None:
    """UsageError if the engine cannot run rollout.quant on this machine."""
    quant, device = config.rollout.quant, parse_device(config.train.device)
    if quant is None:
        return
    if isinstance(config.rollout.engine, HFEngineConfig):
        from onepolicy.models.quant.quantise import check_kernels

        check_kernels(quant, device)
    if isinstance(config.rollout.engine, VLLMEngineConfig):
        from onepolicy.rollout.vllm.quant import check_quant_device

        check_quant_device(quant, cpu=device.type == "cpu")


def uses_reprefill(config: RunConfig) -> bool:
    return isinstance(config.replay, FromRollout) and config.replay.source == "reprefill"


def route_rules(config: RunConfig, routers: Routers) -> RouteSpec:
    replay = config.replay
    missing = (
        replay.missing if isinstance(replay, FromRollout) and replay.source == "engine" else "fine"
    )
    return RouteSpec(routers.layers, routers.num_experts, routers.top_k, missing)


def _check_extras(config: RunConfig) -> None:
    """What is only needed at the end of a run is checked at its start."""
    for setting, package in (("report", "plotly"), ("tensorboard", "tensorboard")):
        if getattr(config.log, setting) and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"log.{setting}: needs {package}, which is not installed; pip install 'onepolicy[report]' or set "
                f"log.{setting}=false"
            )
