"""Tiny random MoE models, each with what makes its family's router special, and helpers to look at their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from onepolicy.types import RoutingTrace, id_dtype

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "intermediate_size": 24}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**BASE, **HEADS, **QWEN, norm_topk_prob=True),
    "qwen3_moe_no_norm": lambda: Qwen3MoeConfig(**BASE, **HEADS, **QWEN, norm_topk_prob=False, mlp_only_layers=[1]),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **BASE, **QWEN, shared_expert_intermediate_size=16, decoder_sparse_step=1, norm_topk_prob=False
    ),
    "olmoe": lambda: OlmoeConfig(
        **BASE, num_experts=8, num_experts_per_tok=3, intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**BASE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=16),
    "deepseek_v3": lambda: DeepseekV3Config(**{**BASE, **MLA}, **GROUPS, norm_topk_prob=True),
    "deepseek_v3_no_norm": lambda: DeepseekV3Config(**{**BASE, **MLA}, **GROUPS, norm_topk_prob=False),
    "deepseek_v3_one_group": lambda: DeepseekV3Config(
        **{**BASE, **MLA}, **{**GROUPS, "n_group": 1, "topk_group": 1}, norm_topk_prob=True
    ),
    "deepseek_v2_groups": lambda: DeepseekV2Config(
        **{**BASE, **MLA}, **GROUPS, topk_method="group_limited_greedy", mlp_bias=False
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**BASE, **HEADS, **GROUPS, norm_topk_prob=True, use_qk_norm=True),
    "gpt_oss": lambda: GptOssConfig(
        **BASE, **HEADS, num_local_experts=8, num_experts_per_tok=3, intermediate_size=16, sliding_window=8
    ),
}


def build(family: str, *, experts: str = "grouped_mm", seed: int = 0, **changes: object) -> PreTrainedModel:
    """Random weights with decided routers and, where the family has one, a selection bias that changes choices."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation=experts
    )
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "e_score_correction_bias" in name or name.endswith("router.bias"):
                tensor.normal_(std=0.3)
            elif "norm" not in name and tensor.dim() > 1:
                tensor.normal_(std=0.2)
    return model.train()


def tokens(rows: int = 3, length: int = 7, *, seed: int = 1) -> Tensor:
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_trace(rows: int, layers: tuple[int, ...], experts: int, top_k: int, *, seed: int = 2) -> RoutingTrace:
    """Different experts in every row, in no particular order."""
    noise = torch.rand(rows, len(layers), experts, generator=torch.Generator().manual_seed(seed))
    ids = noise.argsort(-1)[..., :top_k].to(id_dtype(experts))
    return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), layers, experts)


def loss_and_grads(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that every logit takes part in, run forward and backward now."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=input_ids, use_cache=False).logits
    logits.log_softmax(-1).gather(-1, input_ids.roll(1, -1)[..., None]).mean().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def experts_inputs(model: PreTrainedModel) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(ids, weights) [N, K] that reached each layer's experts, in firing order: the last word on what was computed."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        module.experts.register_forward_pre_hook(
            lambda _, args: seen.append((args[1].clone(), args[2].detach().clone()))
        )
        for module in model.modules()
        if hasattr(module, "experts")
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
