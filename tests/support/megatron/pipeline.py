"""A training step by Megatron's own schedules, on one process or on the stages of a pipeline."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import onepolicy.integrations.megatron as op_megatron
from support.megatron.models import (
    FULL_RECOMPUTE,
    LENGTH,
    SETTINGS,
    VOCABULARY,
    logits_of,
    loss_of,
    tokens_of,
)
from support.replay_models import random_trace

BATCHES = 4
MODEL = {
    "moe_layer_freq": [0, 1, 1, 1],
    "pipeline_dtype": torch.float32,
    "batch_p2p_comm": False,
    "batch_p2p_sync": False,  # a call into CUDA
}


def fill(model: Any) -> None:
    """Set every parameter by its layer and expert, wherever these are in the process."""
    first = parallel_state.get_expert_model_parallel_rank() * (
        model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in model.named_parameters():
        whole = re.sub(
            r"decoder\.layers\.(\d+)",
            lambda found: f"layer {model.decoder.layers[int(found[1])].layer_number}",
            name,
        )
        whole = re.sub(
            r"local_experts\.(\d+)", lambda found: f"expert {int(found[1]) + first}", whole
        )
        scale = 0.2
        if name.endswith("router.weight"):
            scale = 1.0
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale


def chunk(config: Any, virtual: int | None) -> GPTModel:
    """Return this rank's layers, or one of its virtual stages."""
    stage: dict[str, Any] = {"ignore_virtual": virtual is None}
    if virtual is not None:
        stage["vp_stage"] = virtual
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual),
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=virtual,
    )
    fill(model)
    return model


def micro_batches() -> list[tuple[Tensor, Any]]:
    """Return (tokens, routes of all layers) of every micro-batch."""
    made = []
    for seed in range(BATCHES):
        trace = random_trace(3 * LENGTH, (1, 2, 3), 8, 2, seed=seed)
        valid = torch.arange(len(trace)) % 5 != seed
        made.append((tokens_of(seed=seed), type(trace)(trace.ids, valid, trace.layers, 8)))
    return made


def forward_step(batches: Any, model: Any) -> Any:
    tokens, trace = next(batches)
    with op_megatron.replay(model, trace, batch=len(tokens), check=False):
        output = logits_of(model, tokens)

    def loss_function(logits: Tensor) -> Any:
        loss = loss_of(logits, tokens)
        return loss, {"loss": loss.detach()}

    return output, loss_function


def train_step(**parallel: int) -> dict[str, Any]:
    """Return losses, gradients by layer, and the layers of each chunk, of one optimiser step."""
    config = TransformerConfig(**(SETTINGS | MODEL | FULL_RECOMPUTE | parallel))
    stages: list[int | None] = [None]
    if "virtual_pipeline_model_parallel_size" in parallel:
        stages = list(range(parallel["virtual_pipeline_model_parallel_size"]))
    chunks = [chunk(config, stage) for stage in stages]
    schedule = get_forward_backward_func()
    losses = schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches()) for _ in chunks],
        model=chunks,
        num_microbatches=BATCHES,
        seq_length=LENGTH,
        micro_batch_size=3,
        forward_only=False,
    )
    found = {
        (layer.layer_number, name): parameter.grad
        for part in chunks
        for layer in part.decoder.layers
        for name, parameter in layer.named_parameters()
    }
    return {
        "schedule": schedule.__name__,
        "losses": [loss["loss"] for loss in losses],
        "gradients": found,
        "layers": [op_megatron.routers_of(part).layers for part in chunks],
        "stages": [op_megatron.routers_of(part).stage_layers for part in chunks],
    }


def recorded_stage(**parallel: int) -> Any:
    """Return the layers and ids that a stage records in a forward-only run of one micro-batch."""
    config = TransformerConfig(**(SETTINGS | MODEL | parallel))
    model, traces = chunk(config, None), []

    def step(batches: Any, part: Any) -> Any:
        tokens, _ = next(batches)
        with op_megatron.record(part) as tape:
            output = logits_of(part, tokens)
        traces.append(tape.trace())
        return output, lambda logits: (logits.sum(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micro_batches()),
        model=model,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=3,
        forward_only=True,
    )
    return traces[0].layers, traces[0].ids
