"""Tiny random models with recurrent state."""

import torch
from transformers import AutoModelForCausalLM, Lfm2MoeConfig, Qwen3NextConfig

BASE = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0},
}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "head_dim": 16, "num_hidden_layers": 4},
    "shared_expert_intermediate_size": 32,
}
CONVOLUTIONS = {"num_hidden_layers": 3, "num_dense_layers": 1}
CONVOLUTIONS |= {"layer_types": ["conv", "full_attention", "conv"]}
CONFIGS = {
    "lfm2_moe": Lfm2MoeConfig(**BASE, **CONVOLUTIONS),
    "qwen3_next": Qwen3NextConfig(**BASE, **LINEAR),
}


def make(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model
