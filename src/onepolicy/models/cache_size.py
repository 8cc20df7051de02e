"""Elements that an engine keeps in its cache for every token, from the model's config."""

from __future__ import annotations

from transformers import PreTrainedConfig


def cached_elements(text: PreTrainedConfig, layer: int) -> int:
    """Return the elements that a decoder layer caches per token.

    These are keys and values, or the latent of MLA with its rotary part. text: the config of the
    language model.
    """
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer:
        text = per_layer[layer]
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        return int(latent + text.qk_rope_head_dim)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * kv_heads * size)
