"""Tiny random models of the tested families, perturbed so that routers, biases and sinks are not
trivial."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 64
BASE = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"bos_token_id": None, "pad_token_id": 0, "eos_token_id": 1},
}
HEADS = {"head_dim": 16}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GROUPED |= {"n_group": 4, "topk_group": 2}
SIGMOID = {**GROUPED, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8}

CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **BASE, **HEADS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "olmoe": OlmoeConfig(**BASE, num_experts=8, num_experts_per_tok=2),
    "mixtral": MixtralConfig(
        **BASE, **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "deepseek_v3": DeepseekV3Config(**{**BASE, "num_key_value_heads": 4}, **LATENT, **SIGMOID),
    "glm4_moe": Glm4MoeConfig(**BASE, **HEADS, **SIGMOID),
    "gpt_oss": GptOssConfig(
        **BASE,
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3_dense": Qwen3Config(**BASE, **HEADS),
}
MOE = [name for name in CONFIGS if name != "qwen3_dense"]


def changed(name: str, **changes: object) -> PreTrainedConfig:
    """Return the family's config with other values. Layers get the kinds that the family gives."""
    config = CONFIGS[name]
    return type(config)(**{**config.to_dict(), "layer_types": None, **changes})


def make(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    if changes:
        config = changed(name, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        biases = (b for n, b in model.named_buffers() if "correction_bias" in n)
        for tensor in [*model.parameters(), *biases]:
            tensor += 0.05 * torch.randn_like(tensor)
    return model.to(dtype)
