"""Elements that an engine keeps in its cache, per token and per sequence, without weights."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from onepolicy.models.layer_kinds import ATTENTION, LAYER_KINDS, layer_kinds
from onepolicy.models.recurrent.layers import Recurrent, install_recurrent
from onepolicy.models.recurrent.segments import Row, Segments, States

TOKENS = 2  # with which a layer is called: one token would be decoded


def cached_elements(text: PreTrainedConfig, layer: int) -> int:
    """Return the elements that a decoder layer caches per token.

    These are keys and values, or the latent of MLA with its rotary part. text: the config of the
    language model. A layer without attention caches none.
    """
    kinds = layer_kinds(text)
    if layer < len(kinds) and not LAYER_KINDS.get(kinds[layer], ATTENTION).attends:
        return 0
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


def state_bytes(empty: PreTrainedModel) -> int:
    """Return the bytes of the states that a sequence has in recurrent layers of known operators.

    empty: the model of meta or fake tensors, where each such layer is called on a few tokens.
    """
    if not install_recurrent(empty):
        return 0
    tables: dict[tuple[int, str], Tensor] = {}
    width = empty.config.get_text_config().hidden_size
    hidden = next(empty.parameters()).new_empty(1, TOKENS, width)
    one_row = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    for index, layer in enumerate(empty.modules()):
        if isinstance(layer, Recurrent):
            layer.row = Row(Segments((TOKENS,), hidden.device), States(tables, index, 1, one_row))
            with torch.no_grad():
                layer(hidden)
            layer.row = None
    return sum(table.numel() * table.element_size() for table in tables.values())
