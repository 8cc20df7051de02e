"""The learner of a run on several ranks."""

from __future__ import annotations

from typing import Any

import torch

from onepolicy.build.learner import (
    build_adapter,
    build_critic,
    build_reference,
    build_update_parts,
    install_chunks,
    load_training_model,
    routers_of,
    set_num_threads,
)
from onepolicy.config import ModelConfig, RunConfig
from onepolicy.config.input_files import absolute_path
from onepolicy.models.empty import empty_model
from onepolicy.models.load import DTYPES
from onepolicy.sync.adapters import add_adapter
from onepolicy.train.sharded.fsdp import FSDPSharding
from onepolicy.train.sharded.rank import RankLearner, RankScorer
from onepolicy.train.sharded.ranks import Ranks
from onepolicy.train.update_parts import UpdatePart

BUILD = "build"  # name of the call


def build_rank_learner(config: RunConfig, model: ModelConfig, ranks: Ranks) -> RankLearner:
    """Build the learner on all ranks. Every rank has one, with its shards."""
    settings = _anywhere(config).model_dump_json()
    of_model = model.model_copy(update={"path": absolute_path(model.path)})
    with ranks.everywhere(BUILD, config=settings, model=of_model.model_dump_json()):
        return _build(config, model, ranks)


def _anywhere(config: RunConfig) -> RunConfig:
    """Return the settings for ranks with another working folder, which a running Ray gives them."""
    paths = {"path": absolute_path(config.model.path)}
    changed: dict[str, Any] = {"model": config.model.model_copy(update=paths)}
    kl = config.objective.kl
    if kl.reference is not None:
        kl = kl.model_copy(update={"reference": absolute_path(kl.reference)})
        changed["objective"] = config.objective.model_copy(update={"kl": kl})
    return config.model_copy(update=changed)


def _build(config: RunConfig, model: ModelConfig, ranks: Ranks) -> RankLearner:
    torch.manual_seed(config.seed)
    set_num_threads(config)
    sharding = FSDPSharding(ranks.mesh, _compute_dtype(config))
    trained = load_training_model(model, ranks.device, sharding)
    if config.train.lora is not None:
        add_adapter(trained, config.train.lora, model.path, config.seed)
    install_chunks(trained, config)
    scorer = RankScorer(trained, config, routers=routers_of(trained, model), ranks=ranks)
    like = empty_model(model)
    like.generation_config = trained.generation_config
    parts: list[UpdatePart] = []
    reference = adapter = None
    if config.train.lora is not None:
        adapter, parts = build_adapter(scorer)
    if not parts:
        reference = build_reference(scorer, ranks.device, sharding)
    critic = build_critic(model, config, ranks.device, sharding)
    parts += build_update_parts(config, reference=reference, critic=critic)
    return RankLearner(scorer, like=like, parts=parts, critic=critic, adapter=adapter)


def _compute_dtype(config: RunConfig) -> torch.dtype | None:
    """Return the dtype in which sharded forwards compute, None for that of the parameters."""
    if config.train.fsdp_param_dtype == "same":
        return None
    return DTYPES[config.train.fsdp_param_dtype]
