"""Small real GPTModels with experts."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

VOCABULARY, LENGTH, EXPERTS, TOP_K = 64, 12, 8, 2
SETTINGS = {
    **{"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48},
    **{"moe_ffn_hidden_size": 24, "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K},
    **{"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"},
    **{"add_bias_linear": False, "gated_linear_unit": True, "attention_dropout": 0.0},
    **{"hidden_dropout": 0.0, "use_cpu_initialization": True, "bias_dropout_fusion": False},
    **{"bias_activation_fusion": False, "masked_softmax_fusion": False},
    **{"persist_layer_norm": False, "gradient_accumulation_fusion": False},
    "normalization": "RMSNorm",
}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def make_model(seed: int = 0, *, parallel_output: bool = False, **changed) -> GPTModel:
    """Return a model with random weights, router weights large enough for clear choices."""
    torch.manual_seed(seed)
    config = TransformerConfig(**(SETTINGS | changed))
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    heads = None
    if config.mtp_num_layers:
        heads = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type="rope",
        parallel_output=parallel_output,
        mtp_block_spec=heads,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def tokens_of(batch: int = 3, length: int = LENGTH, seed: int = 2) -> Tensor:  # [B, S] int64
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def logits_of(model: GPTModel, tokens: Tensor) -> Tensor:  # [B, S, V]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    return model(tokens, positions, causal[None, None])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    logp = logits[:, :-1].float().log_softmax(-1)
    return -logp.gather(-1, tokens[:, 1:, None]).mean()


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """Return the gradients of the parameters, and forget them."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
