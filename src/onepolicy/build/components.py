"""RunConfig -> the parts of a run. Every check that needs no weights comes before any weights are loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from onepolicy.build.engines import BuildEngine, build_engine, check_engine
from onepolicy.build.learner import build_learner, resolve_model
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
from onepolicy.envs import build
from onepolicy.interfaces import Environment, HoldsWeights, Learner, RolloutEngine
from onepolicy.invariant.contract import agree
from onepolicy.models.load import (
    context_length,
    device_of,
    load_tokenizer,
    read_config,
)
from onepolicy.replay.checks import RouteRules, preflight, refuse_router_loss
from onepolicy.replay.routers import Routers
from onepolicy.rollout.copies import load_copy
from onepolicy.rollout.reprefill import Reprefill
from onepolicy.rollout.spec import EngineSpec
from onepolicy.train.learner import LocalLearner
from onepolicy.train.sharded.team import Ranks


def open_tokenizer(config: RunConfig, model: ModelConfig) -> tuple[PreTrainedTokenizerBase, int]:
    """Tokenizer, and the longest sequence allowed."""
    context = context_length(read_config(model))
    reserved = SGLangConfig.reserved if isinstance(config.rollout.engine, SGLangConfig) else 0
    max_len = config.rollout.engine.max_len or context - reserved
    if max_len > context:
        raise UsageError(f"rollout.engine.max_len: {max_len} is more than the model's context of {context}")
    return load_tokenizer(model), max_len


def open_environment(config: RunConfig, model: ModelConfig) -> tuple[Environment, PreTrainedTokenizerBase, int]:
    """Tokenizer, task and the longest sequence allowed, all checked against each other."""
    tokenizer, max_len = open_tokenizer(config, model)
    rows = config.replay.rows if isinstance(config.replay, FromRollout) else "as-sampled"
    environment = build(config.task, tokenizer, max_len=max_len, rows=rows)
    for max_tokens in {
        config.rollout.sampling.max_tokens,
        config.eval.max_tokens or config.rollout.sampling.max_tokens,
    }:
        environment.check(max_tokens=max_tokens, max_len=max_len)
    if config.eval.every:
        environment.held_out(config.eval.problems)  # are there that many?
    return environment, tokenizer, max_len


@dataclass(frozen=True, slots=True)
class Components:
    """The objects of a run, built once."""

    config: RunConfig
    engine: RolloutEngine
    learner: Learner
    environment: Environment
    stop: tuple[int, ...]  # token ids that end a completion
    routes: RouteRules | None  # what the engine's routes must be; None for a dense model
    reprefill: Reprefill | None = None  # records routes for an engine that returns none
    top_logprobs: int = 0  # of the rollout's likeliest tokens, that the correction needs
    evaluator: RolloutEngine | None = None  # unquantised; given the learner's weights before each evaluation

    @property
    def samplers(self) -> list[HoldsWeights]:
        """Everything that has to follow the learner's weights."""
        return [self.engine] if self.reprefill is None else [self.engine, self.reprefill]


@dataclass(frozen=True, slots=True)
class Pair:
    """The engine that samples and the trainer that learns."""

    config: RunConfig
    engine: RolloutEngine
    learner: LocalLearner
    routes: RouteRules | None  # what the engine's routes must be; None for a dense model


def build_parts(
    config: RunConfig,
    weights: Path | None = None,
    ranks: Ranks | None = None,
    engine_builder: BuildEngine | None = None,
) -> tuple[Components, PreTrainedTokenizerBase]:
    """`weights`: a checkpoint folder to load instead of model.path (resume, fork). ranks: of a sharded learner.

    engine_builder: of the engine that samples; None: `build_engine`.
    """
    _check_extras(config)
    model = resolve_model(config.model) if weights is None else config.model.model_copy(update={"path": str(weights)})
    refuse_unreplayable(config, model)
    environment, tokenizer, max_len = open_environment(config, model)
    pair = build_pair(config, model, max_len, ranks, engine_builder)
    reprefill = None
    if from_reprefill(config):
        from onepolicy.rollout.reprefill import Reprefill

        second = load_copy(model, config.rollout, pair.learner.device)
        combine = isinstance(config.replay, WeightsReplay)
        reprefill = Reprefill(second, tokens=config.train.tokens_per_micro_batch, weights=combine)
    top_logprobs = config.correction.top_logprobs(pair.learner.model.config.get_text_config().vocab_size)
    check_engine(config, pair.engine.caps, top_logprobs)
    stop = (tokenizer.eos_token_id,)
    evaluator = build_evaluator(config, model, pair.learner.device, max_len)
    routes = pair.routes
    parts = Components(config, pair.engine, pair.learner, environment, stop, routes, reprefill, top_logprobs, evaluator)
    return parts, tokenizer


def build_evaluator(config: RunConfig, model: ModelConfig, device: torch.device, max_len: int) -> RolloutEngine | None:
    """An embedded engine with unquantised weights, if evaluations need one."""
    if config.rollout.quant is None or config.eval.quantised or not config.eval.every:
        return None
    return build_unquantised(config, model, device, max_len)


def build_unquantised(config: RunConfig, model: ModelConfig, device: torch.device, max_len: int) -> RolloutEngine:
    """An embedded engine with the settings of the run's engine, but for rollout.quant."""
    engine = config.rollout.engine
    own = HFEngineConfig(dtype=engine.dtype, lm_head=engine.lm_head, slots=engine.slots, max_len=engine.max_len)
    return build_engine(EngineSpec(model, own, device, max_len))


def build_pair(
    config: RunConfig,
    model: ModelConfig,
    max_len: int,
    ranks: Ranks | None = None,
    engine_builder: BuildEngine | None = None,
) -> Pair:
    """Both with the weights of `model`, its reference and critic too."""
    engine_builder = engine_builder or build_engine
    if config.cluster.kind == "ray" and engine_builder is build_engine:
        raise UsageError("cluster.kind: ray, but only `onepolicy train` places processes; give cluster.kind=local here")
    if config.train.ranks and ranks is None:
        raise UsageError(
            f"train.ranks: {config.train.ranks}, but only `onepolicy train` spreads the learner over processes; give "
            "train.ranks=0 here"
        )
    refuse_quant(config)
    learner = build_learner(config, model, ranks)
    rules = route_rules(config, learner.routers) if learner.routers else None
    engine = engine_builder(
        EngineSpec(
            model,
            config.rollout.engine,
            learner.device,
            max_len,
            routes=None if from_reprefill(config) else rules,
            combine_weights=isinstance(config.replay, WeightsReplay),
            numerics=config.numerics,
            quant=config.rollout.quant,
        )
    )
    if config.numerics == ON_POLICY:
        assert engine.caps.contract is not None
        agree(engine.caps.contract, learner.contract)
    return Pair(config, engine, learner, rules)


def refuse_unreplayable(config: RunConfig, model: ModelConfig) -> None:
    hf_config = read_config(model)
    if config.replay.mode != "off":
        preflight(hf_config, config.replay.mode)
    refuse_router_loss(hf_config)


def refuse_quant(config: RunConfig) -> None:
    """UsageError if the engine cannot run rollout.quant on this machine."""
    quant, device = config.rollout.quant, device_of(config.train.device)
    if quant is None:
        return
    if isinstance(config.rollout.engine, HFEngineConfig):
        from onepolicy.models.quant.install import check_kernels

        check_kernels(quant, device)
    if isinstance(config.rollout.engine, VLLMEngineConfig):
        from onepolicy.rollout.vllm.quant import check

        check(quant, cpu=device.type == "cpu")


def from_reprefill(config: RunConfig) -> bool:
    return isinstance(config.replay, FromRollout) and config.replay.source == "reprefill"


def route_rules(config: RunConfig, routers: Routers) -> RouteRules:
    replay = config.replay
    missing = replay.missing if isinstance(replay, FromRollout) and replay.source == "engine" else "fine"
    return RouteRules(routers.layers, routers.num_experts, routers.top_k, missing)


def _check_extras(config: RunConfig) -> None:
    """What is only needed at the end of a run is checked at its start."""
    for setting, package in (("report", "plotly"), ("tensorboard", "tensorboard")):
        if getattr(config.log, setting) and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"log.{setting}: needs {package}, which is not installed; pip install 'onepolicy[report]' or set "
                f"log.{setting}=false"
            )
