"""Settings and objects of `onepolicy measure` and `engine check`, which train nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.build.components import (
    SamplingComponents,
    build_engine_for,
    build_environment,
    check_quant_support,
    check_replayable,
    refuse_distributed,
    with_sampling,
)
from onepolicy.build.engines import build_engine
from onepolicy.build.learner import build_scorer
from onepolicy.config import ModelConfig, RolloutReplay, RunConfig, UsageError, resolve
from onepolicy.config.input_files import resolve_model
from onepolicy.config.measure import measure_settings
from onepolicy.interfaces import RolloutEngine
from onepolicy.models.load import read_config
from onepolicy.replay.checks import RouteSpec
from onepolicy.replay.layers import is_moe
from onepolicy.rollout.hf.pressure import check_pressure
from onepolicy.train.scorer import PolicyScorer


def measure_config(tree: dict[str, Any], overrides: list[str], path: str | None) -> RunConfig:
    """Return the settings of `measure_settings`, without replay if the model is dense."""
    tree, config = measure_settings(tree, overrides, path)
    if config.rollout.pressure is not None:
        check_pressure(config.rollout.pressure, read_config(resolve_model(config.model)))
    if not is_moe(read_config(resolve_model(config.model))):
        return resolve(tree | {"replay": {"mode": "off"}}, overrides)
    if not isinstance(config.replay, RolloutReplay):
        raise UsageError(
            f"replay.mode: {config.replay.mode}, but measure scores with the rollout's routes and "
            "without; leave it out"
        )
    return config


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
    route_spec: RouteSpec | None  # expected form of the engine's routes; None for a dense model


def build_measure_components(
    config: RunConfig,
) -> tuple[MeasureComponents, PreTrainedTokenizerBase]:
    """Build the objects of a measurement in this process, without the parts of an update."""
    model = resolve_model(config.model)
    check_replayable(config, model)
    environment, tokenizer, max_len = build_environment(config, model)
    pair = build_engine_and_scorer(config, model, max_len)
    make = partial(MeasureComponents, scorer=pair.scorer)
    components = with_sampling(
        make, config, model, environment, tokenizer, pair.engine, pair.route_spec, pair.scorer
    )
    return components, tokenizer


def build_engine_and_scorer(config: RunConfig, model: ModelConfig, max_len: int) -> EngineAndScorer:
    """Build both in this process, with the weights of `model`."""
    refuse_distributed(config, None, None)
    check_quant_support(config)
    scorer = build_scorer(config, model)
    engine, route_spec = build_engine_for(
        config, model, max_len, scorer, build_engine, trains=False
    )
    return EngineAndScorer(config, engine, scorer, route_spec)
