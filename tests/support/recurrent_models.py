"""Tiny random models with recurrent state."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.families import TABLE, perturb

SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "intermediate_size": 24},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None},
}
SCAN = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2},
    **{"mamba_d_conv": 4, "mamba_chunk_size": 8, "mamba_expand": 2},
}
DELTA = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DENSE = {  # families without experts
    "bamba": {**SCAN, "attn_layer_indices": [1]},
    "falcon_h1": {**SCAN, "mamba_d_ssm": 64, "head_dim": 8, "mamba_rms_norm": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "olmo_hybrid": {**DELTA, **ALTERNATING},
    "qwen3_5_text": {**DELTA, **ALTERNATING, "head_dim": 8},
}


MOE = (
    "qwen3_next",
    "qwen3_5_moe_text",
    "nemotron_h",
    "granitemoehybrid",
    "jamba",
    "lfm2_moe",
    "kimi_linear",
)
RARE = ("falcon_h1", "olmo_hybrid")  # whose operators another family has too
FAMILIES = [*MOE, *(name for name in DENSE if name not in RARE)]
FAMILIES += [pytest.param(name, marks=pytest.mark.full) for name in RARE]


def hybrid(name):
    """Return a tiny model of MOE or DENSE with random weights."""
    if name in MOE:
        return TABLE[name].model(vocab_size=64, max_position_embeddings=128).eval()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **DENSE[name]))
    perturb(model)
    return model.eval()
