"""Every MoE causal LM of the pinned transformers as a tiny config, with what makes its router special switched on.

Three layers of width 32 where the family allows it; selection biases, routed scales other than 1, dense layers and
sliding windows shorter than the sequence wherever the family has them. `discover()` is what the installed transformers
really holds: a family that an upgrade adds is in none of the tables and turns the completeness test red.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

ALL, DENSE_FIRST = (0, 1, 2), (1, 2)
WINDOW = 4  # shorter than the sequences of the tests


@dataclass(frozen=True)
class Family:
    """One tiny model. `scoring`: how the family turns scores into weights; `layers`: decoder index of its routers."""

    model_type: str
    scoring: str
    options: dict[str, Any]
    layers: tuple[int, ...] = ALL
    norms: bool = False  # `norm_topk_prob` exists and both settings are run
    train: bool = True  # False: routes only in eval mode
    note: str = ""
    base: dict[str, Any] = field(default_factory=lambda: BASE)

    def runs(self) -> tuple[dict[str, Any], ...]:
        """Options of `model()`: stock experts, then the eager loop with the other setting of `norm_topk_prob`."""
        if self.norms:
            return {"norm_topk_prob": True}, {"norm_topk_prob": False, "experts": "eager"}
        return {}, {"experts": "eager"}

    def config(self, **changes: Any) -> PreTrainedConfig:
        return AutoConfig.for_model(self.model_type, **{**self.base, **self.options, **changes})

    def model(self, *, experts: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Random weights with decided routers and selection biases that change choices."""
        torch.manual_seed(seed)
        config, options = self.config(**changes), {"dtype": torch.float32}
        if experts is not None:
            options["experts_implementation"] = experts
        if self.model_type == "mistral4":  # has a causal LM class that the auto class does not know
            model = transformers.Mistral4ForCausalLM._from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, **options)
        perturb(model)
        return model.train(self.train)


def perturb(model: PreTrainedModel) -> None:
    """Decided routers, selection biases that change choices, hash tables that name different experts."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                tensor.copy_(torch.rand(len(tensor), experts).argsort(-1)[:, : tensor.shape[1]])
            elif _BIAS.search(name):
                tensor.normal_(std=0.3)
            elif name.endswith("balancing_biases"):  # of probabilities, not of sigmoids
                tensor.normal_(std=0.05)
            elif name.endswith("per_expert_scale"):
                tensor.uniform_(0.5, 1.5)
            elif "norm" not in name and tensor.dim() > 1 and tensor.is_floating_point():
                tensor.normal_(std=0.2)


_BIAS = re.compile(r"correction_bias|expert_bias|(router|gate)\.bias$")

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 24,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3}
SHARED = {"shared_expert_intermediate_size": 16}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DENSE_ONE = {"first_k_dense_replace": 1}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
GAP = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
INDEXER = {"index_topk": 3, "index_head_dim": 8, "index_n_heads": 2}  # fewer keys than tokens
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 2,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

GROUP_SIGMOID = "sigmoid + bias, groups"
SOFTMAX, SOFTMAX_LAST = "softmax, top-k", "top-k, softmax"
SIGMOID = "sigmoid + bias"

_TABLE = [
    Family("afmoe", SIGMOID, EXPERTS | HEAD | SLIDING | {"num_dense_layers": 1, "route_scale": 1.7}, DENSE_FIRST),
    Family("aria_text", SOFTMAX_LAST, HEAD | {"moe_num_experts": 8, "moe_topk": 3, "moe_num_shared_experts": 1}),
    Family("axk1", GROUP_SIGMOID, GROUPED | LATENT | DENSE_ONE, DENSE_FIRST, norms=True),
    Family("axk2", GROUP_SIGMOID, GROUPED | LATENT | INDEXER | SPARSE, DENSE_FIRST, norms=True),
    Family("cohere2_moe", "top-k, softmax or sigmoid", EXPERTS | HEAD | SLIDING | GAP, (0, 2)),
    Family(
        "dbrx",
        "softmax, top-k, p-norm",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "vocab_size": 61,
            "pad_token_id": 0,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": 32},
        },
        base={},
        note="the block selects, its router only scores",
    ),
    Family(
        "deepseek_v2",
        "softmax, groups, top-k",
        GROUPED | LATENT | DENSE_ONE | {"topk_method": "group_limited_greedy"},
        DENSE_FIRST,
        note="weighs scores masked to the groups, which follow the replayed experts",
    ),
    Family("deepseek_v3", GROUP_SIGMOID, GROUPED | LATENT | DENSE_ONE, DENSE_FIRST, norms=True),
    Family("deepseek_v32", GROUP_SIGMOID, GROUPED | LATENT | INDEXER | SPARSE, DENSE_FIRST, norms=True),
    Family(
        "deepseek_v4",
        "sqrt-softplus + bias",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.7,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 12,
            "o_groups": 2,
            "o_lora_rank": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 2,
            "sliding_window": WINDOW,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
        },
        DENSE_FIRST,
        note="hash layers look experts up by token id and are not bound",
    ),
    Family("dots1", GROUP_SIGMOID, GROUPED | HEAD | DENSE_ONE | SLIDING, DENSE_FIRST, norms=True),
    Family(
        "ernie4_5_moe",
        "softmax + bias",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
        },
        DENSE_FIRST,
    ),
    Family(
        "exaone_moe",
        GROUP_SIGMOID,
        EXPERTS
        | HEAD
        | SLIDING
        | SPARSE
        | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
        | {"routed_scaling_factor": 1.7},
        DENSE_FIRST,
        norms=True,
    ),
    Family("flex_olmo", SOFTMAX, {"num_experts": 8, "num_experts_per_tok": 3}, norms=True),
    Family(
        "gemma4_text",
        "softmax, top-k, scale per expert",
        HEAD
        | SLIDING
        | {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
        },
        note="a dense MLP runs beside the experts",
    ),
    Family("glm4_moe", GROUP_SIGMOID, GROUPED | HEAD | DENSE_ONE | {"use_qk_norm": True}, DENSE_FIRST, norms=True),
    Family("glm4_moe_lite", GROUP_SIGMOID, GROUPED | LATENT | SPARSE, DENSE_FIRST, norms=True),
    Family(
        "glm_moe_dsa",
        GROUP_SIGMOID,
        GROUPED | LATENT | INDEXER | SPARSE | {"indexer_types": ["full", "shared", "full"]},
        DENSE_FIRST,
        norms=True,
    ),
    Family("gpt_oss", SOFTMAX_LAST, LOCAL | HEAD | SLIDING | ROPE),
    Family("granitemoe", SOFTMAX_LAST, LOCAL),
    Family("granitemoe_swa", SOFTMAX_LAST, LOCAL | SLIDING | {"shared_intermediate_size": 16}),
    Family("granitemoehybrid", SOFTMAX_LAST, LOCAL | LINEAR | MAMBA | {"shared_intermediate_size": 16}),
    Family("granitemoeshared", SOFTMAX_LAST, LOCAL | {"shared_intermediate_size": 16}),
    Family("hunyuan_v1_moe", SOFTMAX, HEAD | {"num_experts": 8, "moe_topk": 3}),
    Family("hy_v3", SIGMOID, EXPERTS | HEAD | SPARSE | {"router_scaling_factor": 1.7}, DENSE_FIRST),
    Family(
        "hy_v4",
        GROUP_SIGMOID,
        GROUPED
        | LATENT
        | INDEXER
        | SPARSE
        | {"num_key_value_heads": 4, "head_dim": 8, "hc_mult": 2, "indexer_types": ["full", "shared", "full"]},
        DENSE_FIRST,
        norms=True,
    ),
    Family(
        "inkling_text",
        "sigmoid + bias, softmax with the shared experts",
        HEAD
        | {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "route_scale": 1.7,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "sliding_window_size": WINDOW,
            "d_rel": 4,
            "rel_extent": 16,
            "conv_kernel_size": 2,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        }
        | SPARSE,
        DENSE_FIRST,
    ),
    Family(
        "jamba",
        "softmax, top-k",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_hidden_layers": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_d_conv": 2,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
        },
        (1, 3),
        note="the block selects, its router is a linear layer",
    ),
    Family(
        "jetmoe",
        SOFTMAX_LAST,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 4},
        (0, 0, 1, 1, 2, 2),
        note="two routers per layer, of the MLP and of the attention",
    ),
    Family(
        "kimi_linear",
        GROUP_SIGMOID,
        LATENT
        | LINEAR
        | SPARSE
        | {
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "routed_scaling_factor": 1.7,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 2,
        },
        DENSE_FIRST,
    ),
    Family(
        "laguna",
        SIGMOID,
        EXPERTS
        | HEAD
        | SHARED
        | SLIDING
        | SPARSE
        | {"num_attention_heads_per_layer": [4, 4, 4], "moe_router_logit_softcapping": 2.0}
        | {"moe_routed_scaling_factor": 1.7},
        DENSE_FIRST,
    ),
    Family(
        "lfm2_moe",
        SIGMOID,
        EXPERTS
        | {"num_dense_layers": 1, "routed_scaling_factor": 1.7, "layer_types": ["conv", "full_attention", "conv"]},
        DENSE_FIRST,
        norms=True,
    ),
    Family(
        "llama4_text",
        "top-k, sigmoid",
        LOCAL | HEAD | {"intermediate_size_mlp": 24, "moe_layers": [0, 2], "attention_chunk_size": WINDOW},
        (0, 2),
        note="every expert sees every token, scaled by a weight that is 0 unless selected",
    ),
    Family(
        "longcat_flash",
        "softmax + bias",
        LATENT
        | {
            "num_layers": 2,
            "ffn_hidden_size": 24,
            "moe_topk": 3,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 16,
            "routed_scaling_factor": 1.7,
            "head_dim": 4,
        },
        (0, 1),
        base={k: v for k, v in BASE.items() if k not in ("num_hidden_layers", "intermediate_size")},
        note="experts that return their input are replayed as any other",
    ),
    Family("mellum", SOFTMAX, LOCAL | HEAD | SLIDING | GAP | {"moe_intermediate_size": 16}, (0, 2), norms=True),
    Family(
        "mimo_v2_flash", GROUP_SIGMOID, GROUPED | HEAD | SLIDING | SPARSE | {"v_head_dim": 8}, DENSE_FIRST, norms=True
    ),
    Family("minimax", SOFTMAX, LOCAL | HEAD | LINEAR | {"block_size": 4}),
    Family("minimax_m2", SIGMOID, LOCAL | HEAD),
    Family(
        "minimax_m3_vl_text",
        SIGMOID,
        LOCAL
        | HEAD
        | SPARSE
        | {
            "dense_intermediate_size": 24,
            "shared_intermediate_size": 16,
            "routed_scaling_factor": 1.7,
            "rotary_dim": 4,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
        DENSE_FIRST,
    ),
    Family(
        "mistral4",
        "softmax, groups, top-k",
        GROUPED | LATENT | DENSE_ONE | {"qk_nope_head_dim": 4},
        DENSE_FIRST,
        norms=True,
    ),
    Family("mixtral", SOFTMAX, LOCAL | {"sliding_window": WINDOW}),
    Family(
        "nemotron_h",
        GROUP_SIGMOID,
        GROUPED
        | HEAD
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "moe_shared_expert_intermediate_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 2,
            "chunk_size": 8,
            "use_mamba_kernels": False,
            "num_nextn_predict_layers": 1,
        },
        (1, 3),
        norms=True,
        base={k: v for k, v in BASE.items() if k != "num_hidden_layers"},
    ),
    Family("olmoe", SOFTMAX, {"num_experts": 8, "num_experts_per_tok": 3}, norms=True),
    Family(
        "phimoe",
        "sparsemixer",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        train=False,
        note="two sequential maxima instead of a top-k; draws experts at random in train mode, which is refused",
    ),
    Family(
        "qwen2_moe",
        SOFTMAX,
        EXPERTS | SHARED | SLIDING | {"decoder_sparse_step": 2, "use_sliding_window": True},
        (1,),
        norms=True,
    ),
    Family("qwen3_5_moe_text", SOFTMAX, EXPERTS | HEAD | SHARED | LINEAR | DELTA),
    Family("qwen3_moe", SOFTMAX, EXPERTS | HEAD | {"mlp_only_layers": [1]}, (0, 2), norms=True),
    Family(
        "qwen3_next",
        SOFTMAX,
        EXPERTS | HEAD | SHARED | LINEAR | DELTA | {"mlp_only_layers": [0]},
        DENSE_FIRST,
        norms=True,
    ),
    Family(
        "qwen4_exp_text",
        SOFTMAX,
        EXPERTS | HEAD | SHARED | DELTA | {"layer_types": ["linear_attention"] * 3, "hc_count": 2, "hc_lowrank": 4},
        norms=True,
    ),
    Family("solar_open", GROUP_SIGMOID, GROUPED | HEAD, norms=True),
    Family(
        "zaya",
        "softmax + bias",
        {
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "router_hidden_size": 16,
            "head_dim": 8,
        },
        note="the skip class is replayed; the family hands it to the experts as expert 0 with weight 0",
    ),
]
TABLE = {family.model_type: family for family in _TABLE}

REFUSED = {"doge": "its router mixes the tokens of a batch"}
NO_EXPERTS = ("bamba",)  # modules that name experts without having any
NO_CAUSAL_LM = {  # modules with routed experts but no causal LM class to bind
    "deepseek_ocr2": "image to text",
    "diffusion_gemma": "denoises blocks",
    "ernie4_5_vl_moe": "image and video to text",
    "glm4v_moe": "image to text",
    "glm5_next": "image to text",
    "nllb_moe": "encoder-decoder",
    "openai_privacy_filter": "token classification",
    "qwen3_omni_moe": "speech, image and video to text",
    "qwen3_vl_moe": "image and video to text",
    "step3p7": "image to text",
    "switch_transformers": "encoder-decoder",
    "vitpose_backbone": "image backbone",
}
_EXPERTS = re.compile(r"\b(num_experts|num_local_experts|n_routed_experts|moe_num_experts)\b")
_CAUSAL_LM = re.compile(r"^class \w+ForCausalLM\(", re.MULTILINE)


def discover() -> tuple[set[str], set[str]]:
    """Model folders of the installed transformers that name experts: (with a causal LM class, without one)."""
    with_lm, without = set(), set()
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if _EXPERTS.search(source):
            (with_lm if _CAUSAL_LM.search(source) else without).add(path.parent.name)
    return with_lm, without


def folder(model_type: str) -> str:
    """Folder under transformers/models: text halves of multimodal models live with their parents."""
    return model_type.removesuffix("_text")
