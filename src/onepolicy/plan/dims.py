"""What a plan has to know of a model. Parameters are counted on the model itself, built without memory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.load import read_config
from onepolicy.models.prepare import ATTENTION_LAYERS
from onepolicy.replay.layers import find_routers


@dataclass(frozen=True, slots=True)
class Attention:
    """One decoder layer's attention, per token."""

    cached: int  # elements an engine keeps: keys and values, or the latent of MLA
    heads: int  # key-value heads the cache can be split over; 1 where it cannot
    width: int  # multiply-adds of a query with one key and its value: heads * (key width + value width)
    window: int | None  # tokens a query sees; None: all
    latent: bool = False  # MLA

    def seen(self, length: float) -> float:
        """Tokens of a context of `length` that are kept and read."""
        return length if self.window is None else min(length, self.window)


@dataclass(frozen=True, slots=True)
class Dims:
    name: str
    hidden: int
    vocab: int
    context: int  # tokens
    total: int  # parameters, all of them
    routed: int  # of these in routed experts
    embedding: int  # of these in the input embedding, which multiplies nothing
    outside: int  # of these outside decoder layers: embedding, head, norm
    largest_layer: int  # of one decoder layer
    experts: int  # routed experts of a MoE layer, 0 if dense
    top_k: int
    moe_layers: int  # routers
    attention: tuple[Attention, ...]  # of every decoder layer

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def active(self) -> float:
        """Parameters a token meets, its embedding row's matrix counted whole as is usual (3.3B of Qwen3-30B-A3B)."""
        return self.total - self.routed * (1 - self.share)

    @property
    def multiplied(self) -> float:
        """Parameters a token is multiplied with."""
        return self.active - self.embedding

    @property
    def share(self) -> float:
        """Of a layer's routed experts that one token meets."""
        return self.top_k / self.experts if self.experts else 0.0

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    def touched(self, tokens: float) -> float:
        """Expected share of the routed experts that `tokens` tokens meet if routers choose evenly: 1 - (1 - k/E)^n."""
        return 1 - (1 - self.share) ** tokens

    def kv_elements(self, length: float) -> float:
        """Elements of keys and values that a sequence of `length` tokens keeps."""
        return sum(a.cached * a.seen(length) for a in self.attention)

    def attention_flops(self, length: float) -> float:
        """Of the attention of one sequence's forward, causal: 2 per multiply-add, a token sees half of the others."""
        return sum(
            2 * a.width * (length * seen - seen * seen / 2) for a, seen in self._seen(length)
        )

    def decode_flops(self, length: float) -> float:
        """Of the attention of one token behind `length` others."""
        return sum(2 * a.width * seen for a, seen in self._seen(length))

    def _seen(self, length: float) -> list[tuple[Attention, float]]:
        return [(a, a.seen(length)) for a in self.attention]


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Names that ship with us -> {"hub_id", "source", "config": fields of its config.json}."""
    folder = files("onepolicy.plan") / "models"
    found = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda e: e.name
    )
    return {
        entry.name.removesuffix(".json"): json.loads(entry.read_text(encoding="utf-8"))
        for entry in found
    }


def read_hf_config(model: ModelConfig) -> PreTrainedConfig:
    """Of a name that ships with us (or its hub id), a folder or any other hub id. UsageError if there is none."""
    for name, entry in known_models().items():
        if model.path.lower() in (name.lower(), entry["hub_id"].lower()):
            fields = dict(entry["config"])
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
    try:
        return read_config(model)
    except UsageError as error:
        raise UsageError(
            f"{error} (known without a download: {', '.join(known_models())})"
        ) from error


def read_dims(model: PreTrainedModel, name: str) -> Dims:
    """`model` may be made of fake or meta tensors."""
    text = model.config.get_text_config()
    layers = decoder_layers(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    routed = {path: p.numel() for path, p in model.named_parameters() if is_routed(path)}
    routers = find_routers(model) if routed else ()
    experts, top_k = (routers[0].num_experts, routers[0].top_k) if routers else (0, 0)
    total = sum(p.numel() for p in model.parameters())
    table, head = (
        getattr(get(), "weight", None)
        for get in (model.get_input_embeddings, model.get_output_embeddings)
    )
    assert isinstance(table, Tensor)
    return Dims(
        name=name,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        context=text.max_position_embeddings,
        total=total,
        routed=sum(routed.values()),
        embedding=0 if head is table else table.numel(),
        outside=total - sum(sizes),
        largest_layer=max(sizes),
        experts=experts,
        top_k=top_k,
        moe_layers=len(routers),
        attention=tuple(_attention(text, i) for i in range(len(layers))),
    )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list that holds the decoder's layers."""
    depth = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise UsageError(
        f"model.path: {type(model).__name__} keeps no list of {depth} decoder layers; it cannot be run dry"
    )


def is_routed(path: str) -> bool:
    """Whether this parameter belongs to one of the experts that a router chooses from, in transformers' naming."""
    return ".experts." in path


def _attention(text: PreTrainedConfig, layer: int) -> Attention:
    if per_layer := getattr(text, "per_layer_config", None):
        text = per_layer[layer]
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds else "full_attention"
    if kind not in ATTENTION_LAYERS:
        raise UsageError(
            f"model.path: {text.model_type} has {kind} layers, which cannot be trained packed"
        )
    window = text.sliding_window if kind == "sliding_attention" else None
    if (
        kinds is None
        and getattr(text, "sliding_window", None)
        and getattr(text, "use_sliding_window", True)
    ):
        window = text.sliding_window
    heads = text.num_attention_heads
    if latent := getattr(text, "kv_lora_rank", None):
        key, value = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
        return Attention(
            latent + text.qk_rope_head_dim, 1, heads * (key + value), window, latent=True
        )
    shared = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    both = 2 * shared * size
    return Attention(both, shared, 2 * heads * size, window)


def route_bytes(dims: Dims) -> int:
    """Of one token's routes as a RoutingTrace: one byte per choice up to 256 experts, else two."""
    return dims.moe_layers * dims.top_k * (1 if dims.experts <= 256 else 2)


def format_count(count: float) -> str:
    return (
        f"{count / 1e9:.1f}B"
        if count >= 1e9
        else f"{count / 10 ** (6 * math.ceil(count >= 1)):.1f}M"
    )
