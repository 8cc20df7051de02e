"""Models with random weights in real shapes, and batches of random tokens for them."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from gpu.harness import Bench
from gpu.shapes import QWEN3_06B, QWEN3_30B, TOY, TOY_MOE
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.types import Group, RoutingTrace, Sample, id_dtype


def make(config: Any, bench: Bench, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """Return a model with random weights, made on the device."""
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, attn_implementation=attention
        )
    return model.eval()


def dense(bench: Bench, **changes: Any) -> Qwen3Config:
    """Return the config of Qwen3-0.6B."""
    shape = {**bench.size(QWEN3_06B, TOY), **changes}
    return Qwen3Config(**shape, bos_token_id=None, pad_token_id=0, eos_token_id=1)


def moe(bench: Bench, **changes: Any) -> Qwen3MoeConfig:
    """Return the config of Qwen3-30B-A3B."""
    shape = {**bench.size(QWEN3_30B, TOY_MOE), **changes}
    return Qwen3MoeConfig(**shape, bos_token_id=None, pad_token_id=0, eos_token_id=1)


def prepared(model: PreTrainedModel, chunk: int) -> PreTrainedModel:
    """Return the model as the learner computes it. chunk: slots of logits at a time, 0 for all."""
    prepare_for_training(model, next(model.parameters()).device)
    if chunk:
        install_logits_chunks(model, chunk)
    return model


def ragged(count: int, shortest: int) -> list[int]:
    """Return lengths between `shortest` and twice that, the same every time."""
    rng = random.Random(0)
    return [rng.randint(shortest, 2 * shortest) for _ in range(count)]


def samples(
    vocabulary: int, lengths: list[int], prompt: int, routes: tuple[int, int, int] | None = None
) -> list[Group]:
    """Return groups of 8 samples of random tokens, `prompt` of them the prompt.

    lengths: tokens of each sample. routes: (layers, experts, top_k) of random routes.
    """
    generator = torch.Generator().manual_seed(0)
    made = []
    for n in lengths:
        slots = n - 1
        trainable = torch.arange(slots) >= prompt - 1
        zeros = torch.zeros(slots, dtype=torch.int32)
        trace = None
        if routes is not None:
            layers, experts, top_k = routes
            scores = torch.rand(slots, layers, experts, generator=generator)
            ids = scores.topk(top_k).indices.to(id_dtype(experts))
            valid = torch.ones(slots, dtype=torch.bool)
            trace = RoutingTrace(ids, valid, tuple(range(layers)), experts)
        made.append(
            Sample(
                tokens=torch.randint(2, vocabulary, (n,), generator=generator, dtype=torch.int32),
                trainable=trainable,
                logp_rollout=torch.where(trainable, -11.9, torch.nan),
                version=zeros,
                turn=torch.where(trainable, 0, -1).int(),
                temperature=1.0,
                reward=0.0,
                finish="stop",
                outcome=(-1.0) ** len(made),
                routing=trace,
            )
        )
    return [Group(i // 8, tuple(made[i : i + 8])) for i in range(0, len(made), 8)]


def parameters_multiplied(model: PreTrainedModel) -> tuple[int, int]:
    """Return the parameters that a dense model multiplies every token by, and those of its head."""
    head = model.get_output_embeddings().weight.numel()
    embeddings = model.get_input_embeddings().weight.numel()
    total = sum(p.numel() for p in model.parameters())
    body = total - embeddings
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        body -= head
    return body, head
