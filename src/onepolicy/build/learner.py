"""The learner of a run in one process: its reference, critic, adapter and recorder of routes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from onepolicy.config import ModelConfig, RunConfig, UsageError, WeightsReplay
from onepolicy.config.input_files import resolve_model
from onepolicy.config.model import usable_cores
from onepolicy.config.numerics import ON_POLICY
from onepolicy.invariant.enable import enable_invariant
from onepolicy.models import fp32_head
from onepolicy.models.chunk_size import slots_per_chunk
from onepolicy.models.empty import empty_model
from onepolicy.models.load import (
    DTYPES,
    context_length,
    load_model,
    parse_device,
    read_config,
)
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training, recurrent_layers
from onepolicy.replay.layers import is_moe
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.copies import load_engine_copy
from onepolicy.sync.adapters import add_adapter
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.critic import Critic
from onepolicy.train.learner import LocalLearner
from onepolicy.train.lora import Adapter, FrozenReference
from onepolicy.train.reprefill import Reprefill
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.update_parts import CurrentPolicyCorrection, Reference, UpdatePart

if TYPE_CHECKING:
    from onepolicy.train.sharded.fsdp import FSDPSharding


def build_learner(config: RunConfig, model: ModelConfig) -> LocalLearner:
    """Build the learner of one process, its reference and its critic, with the model's weights."""
    scorer = build_scorer(config, model)
    parts: list[UpdatePart] = []
    reference = adapter = None
    if config.train.lora is not None:
        adapter, parts = build_adapter(scorer)
    if not parts:  # else the model without its adapter is the reference
        reference = build_reference(scorer, scorer.device)
    critic = build_critic(model, config, scorer.device)
    parts += build_update_parts(config, reference=reference, critic=critic)
    return LocalLearner(scorer, parts=parts, critic=critic, adapter=adapter)


def build_adapter(scorer: PolicyScorer) -> tuple[Adapter, list[UpdatePart]]:
    """Return the adapter inside this scorer's model, and the parts of the update it brings.

    The reference of objective.kl is the model without its adapter, unless another one is named.
    """
    config = scorer.config
    adapter = Adapter(scorer.model, adapter_name(config))
    if config.objective.kl.coef and config.objective.kl.reference is None:
        return adapter, [FrozenReference(adapter)]
    return adapter, []


def adapter_name(config: RunConfig) -> str:
    """Return the name of a run's adapter in engines and replies: the name of its run folder."""
    return f"lora-{Path(config.out).name}"


def build_scorer(config: RunConfig, model: ModelConfig) -> PolicyScorer:
    """Build the policy of one process, without the parts that only an update needs."""
    torch.manual_seed(config.seed)  # for models whose code draws random numbers; ours do not
    set_num_threads(config)
    trained = load_training_model(model, parse_device(config.train.device))
    if config.train.lora is not None:
        add_adapter(trained, config.train.lora, model.path, config.seed)
    install_chunks(trained, config)
    return PolicyScorer(trained, config, routers=routers_of(trained, model))


def routers_of(loaded: PreTrainedModel, model: ModelConfig) -> Routers | None:
    """Return the routers of a MoE model, None for a dense one."""
    if not is_moe(read_config(model)):
        return None
    return bind_routers(loaded)


def build_update_parts(
    config: RunConfig, *, reference: PreTrainedModel | None = None, critic: Critic | None = None
) -> list[UpdatePart]:
    """Build the parts of an update other than the policy's loss, in the order of their calls."""
    parts: list[UpdatePart] = []
    if reference is not None:
        parts.append(Reference(reference))
    if config.correction.live_part is not None:
        parts.append(CurrentPolicyCorrection(config.correction, config.correction.live_part))
    if critic is not None:
        parts.append(critic)
    return parts


def set_num_threads(config: RunConfig) -> None:
    """Set torch's threads in this process to train.threads, or to its share of the cores.

    An engine that computes in this process at the same time as the trainer gets as many threads.
    Both then get half of the cores: two thread pools on the same cores wait for each other.
    """
    cores = usable_cores()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    elif config.rollout.overlaps and _engine_in_process(config) and not config.train.ranks:
        torch.set_num_threads(max(1, cores // 2))
    elif config.train.ranks and "RANK" not in os.environ:  # the launcher sets it for its ranks
        torch.set_num_threads(max(1, cores // config.train.ranks))


def _engine_in_process(config: RunConfig) -> bool:
    return config.rollout.engine.kind == "hf" and config.cluster.kind == "local"


def build_reference(
    scorer: PolicyScorer, device: torch.device, sharding: FSDPSharding | None = None
) -> PreTrainedModel | None:
    """Load the frozen model of objective.kl, if there is one. It routes without replay."""
    config, vocab_size = scorer.config, scorer.vocab_size
    if not config.objective.kl.coef:
        return None
    model_config = resolve_model(config.model)
    if config.objective.kl.reference is not None:
        model_config = model_config.model_copy(update={"path": config.objective.kl.reference})
    try:
        reference_size = read_config(model_config).get_text_config().vocab_size
    except UsageError as error:
        raise UsageError(str(error).replace("model.path", "objective.kl.reference", 1)) from error
    if reference_size != vocab_size:
        raise UsageError(
            f"objective.kl.reference: {model_config.path} has {reference_size} tokens, the policy "
            f"{vocab_size}; choose a reference with the policy's vocabulary"
        )
    reference = load_training_model(model_config, device, sharding).requires_grad_(False)
    if recurrent_layers(reference):
        scorer.batcher.shares_prompts = False  # of the micro-batches that both compute
    install_chunks(reference, config)
    if config.numerics == ON_POLICY:
        enable_invariant(reference)  # equal weights then have a KL of exactly 0
    return reference


def load_training_model(
    model: ModelConfig, device: torch.device, sharding: FSDPSharding | None = None
) -> PreTrainedModel:
    """Load a model as the trainer computes it: its dtypes, packed samples, all ranks."""
    compute = None
    if sharding is None:
        loaded = load_model(model, DTYPES[model.dtype], device)
    else:
        compute = sharding.compute
        host = torch.device("cpu")
        loaded = sharding.load(
            empty_model(model), lambda: load_model(model, DTYPES[model.dtype], host)
        )
    if model.lm_head == "float32":
        fp32_head.install_fp32_head(loaded, DTYPES[model.dtype], field="model.lm_head")
    prepare_for_training(loaded, device, compute=compute)
    return loaded


def install_chunks(loaded: PreTrainedModel, config: RunConfig) -> None:
    """Let the model compute its logits in chunks if a micro-batch can have more slots than one."""
    slots = slots_per_chunk(config.train.logits_chunk, loaded.config.get_text_config().vocab_size)
    longest = config.rollout.engine.max_len or context_length(loaded.config)
    most_slots = max(config.train.tokens_per_micro_batch, longest)
    if 0 < slots < most_slots and config.numerics != ON_POLICY:
        install_logits_chunks(loaded, slots)


def build_critic(
    model: ModelConfig,
    config: RunConfig,
    device: torch.device,
    sharding: FSDPSharding | None = None,
) -> Critic | None:
    """Build a critic that starts from the policy's weights, if the objective has one."""
    if not config.objective.has_critic:
        return None
    trained = load_training_model(model.model_copy(update={"lm_head": "same"}), device)
    if config.train.activation_checkpointing:
        checkpoint_activations(trained)
    protect = "value" in config.correction.protect
    assert config.objective.critic is not None, "the settings set it with baseline = critic"
    autocast = DTYPES.get(config.train.autocast)
    return Critic(
        trained, config.objective.critic, config.optim, sharding, protect=protect, autocast=autocast
    )


def build_reprefill(config: RunConfig, model: ModelConfig, device: torch.device) -> Reprefill:
    """Build a second copy of the model, in the engine's dtype, that records routes."""
    recording_model = load_engine_copy(model, config.rollout, device)
    routers = bind_routers(recording_model)
    scorer = PolicyScorer(recording_model.eval(), config, routers=routers)
    combine = isinstance(config.replay, WeightsReplay)
    return Reprefill(scorer, tokens=config.train.tokens_per_micro_batch, weights=combine)
