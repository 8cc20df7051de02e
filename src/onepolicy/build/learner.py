"""The learner of a run, its reference and its critic: of one process, or this process's part of several."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from onepolicy.config import ModelConfig, RunConfig, UsageError
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.policy import PolicyConfig, cached_path
from onepolicy.models.load import DTYPES, empty_model, load_model, parse_device, read_config
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.checks import is_moe
from onepolicy.replay.routers import bind_routers
from onepolicy.train.extension import LearnerExtension, Reference
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer

if TYPE_CHECKING:
    from onepolicy.train.critic import Critic
    from onepolicy.train.sharded.fsdp import FSDPSharding
    from onepolicy.train.sharded.learner import ShardedLearner
    from onepolicy.train.sharded.rank import RankLearner
    from onepolicy.train.sharded.rank_group import DistributedContext


def resolve_model(model: ModelConfig) -> ModelConfig:
    """`tiny` -> the folder in the user's cache."""
    if model.path != "tiny":
        return model
    path = cached_path(PolicyConfig())
    if not path.is_dir():
        raise UsageError(
            "model.path: the tiny policy has not been made yet; run `onepolicy make-policy` once"
        )
    return model.model_copy(update={"path": str(path)})


def build_learner(
    config: RunConfig, model: ModelConfig, ranks: DistributedContext | None
) -> LocalLearner | ShardedLearner:
    """With the weights of `model`, its reference and critic too. ranks: that this process drives, of a sharded one."""
    if ranks is None:
        scorer = build_scorer(config, model)
        reference = build_reference(config, scorer.vocabulary, scorer.device)
        critic = build_critic(model, config, scorer.device)
        return LocalLearner(
            scorer,
            extensions=build_extensions(config, reference=reference, critic=critic),
            critic=critic,
        )
    assert ranks.rank_group is not None, "a rank builds its part by build_rank_learner"
    from onepolicy.train.sharded.learner import ShardedLearner
    from onepolicy.train.sharded.wire import Message

    build = {"do": "build", "config": config.model_dump_json(), "model": model.model_dump_json()}
    ranks.rank_group.broadcast(Message(build))
    with ranks.rank_group.attribute_failures():  # all ranks check their forward together
        own = build_rank_learner(config, model, ranks)
        ranks.rank_group.recv()
    return ShardedLearner(own, ranks.rank_group)


def build_scorer(config: RunConfig, model: ModelConfig) -> PolicyScorer:
    """The policy alone, of one process: nothing that only an update needs."""
    torch.manual_seed(
        config.seed
    )  # nothing here draws from it; models with code of their own might
    set_num_threads(config)
    trained = load_training_model(model, parse_device(config.train.device))
    return PolicyScorer(
        trained, config, routers=bind_routers(trained) if is_moe(read_config(model)) else None
    )


def build_rank_learner(
    config: RunConfig, model: ModelConfig, ranks: DistributedContext
) -> RankLearner:
    """This process's part of a learner on several ranks."""
    from onepolicy.train.sharded.fsdp import FSDPSharding
    from onepolicy.train.sharded.rank import RankLearner, RankScorer

    torch.manual_seed(config.seed)
    set_num_threads(config)
    sharding = FSDPSharding(ranks.mesh, compute_dtype(config))
    trained = load_training_model(model, ranks.device, sharding)
    scorer = RankScorer(
        trained, config, routers=bind_routers(trained) if is_moe(read_config(model)) else None
    )
    like = empty_model(model)
    like.generation_config = trained.generation_config
    reference = build_reference(config, scorer.vocabulary, ranks.device, sharding)
    critic = build_critic(model, config, ranks.device, sharding)
    extensions = build_extensions(config, reference=reference, critic=critic)
    return RankLearner(scorer, like=like, extensions=extensions, critic=critic)


def build_extensions(
    config: RunConfig, *, reference: PreTrainedModel | None = None, critic: Critic | None = None
) -> list[LearnerExtension]:
    """What an update has beside the policy's own loss, in the order in which the learner calls it."""
    extensions: list[LearnerExtension] = [] if reference is None else [Reference(reference)]
    if config.correction.live_part is not None:
        from onepolicy.train.current_policy import CurrentPolicyCorrection

        extensions.append(CurrentPolicyCorrection(config.correction, config.correction.live_part))
    return extensions if critic is None else [*extensions, critic]


def compute_dtype(config: RunConfig) -> torch.dtype | None:
    return (
        None if config.train.fsdp_param_dtype == "same" else DTYPES[config.train.fsdp_param_dtype]
    )


def set_num_threads(config: RunConfig) -> None:
    """train.threads for the trainer and every engine in this process, each of them if they compute at the same time."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    elif config.rollout.overlaps and _embedded(config) and not config.train.ranks:
        torch.set_num_threads(
            max(1, (os.cpu_count() or 1) // 2)
        )  # two teams on the same cores wait for each other
    elif (
        config.train.ranks and "RANK" not in os.environ
    ):  # torchrun and `ranks.started` have set it for theirs
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.train.ranks))


def _embedded(config: RunConfig) -> bool:
    """Whether the engine computes in this process."""
    return config.rollout.engine.kind == "hf" and config.cluster.kind == "local"


def build_reference(
    config: RunConfig, vocabulary: int, device: torch.device, sharding: FSDPSharding | None = None
) -> PreTrainedModel | None:
    """The frozen model of objective.kl, if there is one. It routes every token itself."""
    if not config.objective.kl.coef:
        return None
    model_config = resolve_model(config.model)
    if config.objective.kl.reference is not None:
        model_config = model_config.model_copy(update={"path": config.objective.kl.reference})
    try:
        own = read_config(model_config).get_text_config().vocab_size
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "objective.kl.reference", 1)) from error
    if own != vocabulary:
        raise UsageError(
            f"objective.kl.reference: {model_config.path} has {own} tokens, the policy {vocabulary}"
        )
    reference = load_training_model(model_config, device, sharding).requires_grad_(False)
    if config.numerics == ON_POLICY:
        from onepolicy.invariant.enable import enable_invariant

        enable_invariant(reference)  # equal weights then have a KL of exactly 0
    return reference


def load_training_model(
    model: ModelConfig, device: torch.device, sharding: FSDPSharding | None = None
) -> PreTrainedModel:
    """The model as the trainer computes it: in its dtype, its lm_head too, ready for packed samples, on all ranks."""
    if sharding is None:
        loaded = load_model(model, DTYPES[model.dtype], device)
    else:
        host = torch.device("cpu")
        loaded = sharding.load(
            empty_model(model), lambda: load_model(model, DTYPES[model.dtype], host)
        )
    if model.lm_head == "float32":
        from onepolicy.models import fp32_head

        fp32_head.install_fp32_head(loaded, DTYPES[model.dtype], field="model.lm_head")
    prepare_for_training(loaded, device, compute=None if sharding is None else sharding.compute)
    return loaded


def build_critic(
    model: ModelConfig,
    config: RunConfig,
    device: torch.device,
    sharding: FSDPSharding | None = None,
) -> Critic | None:
    """A critic that starts from the policy's weights, if the objective has one."""
    if config.objective.critic is None:
        return None
    from onepolicy.train.critic import Critic

    own = load_training_model(model.model_copy(update={"lm_head": "same"}), device)
    protect = "value" in config.correction.protect
    return Critic(own, config.objective.critic, config.optim, sharding, protect=protect)
