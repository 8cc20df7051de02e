"""The dimensions of a model, counted on the model itself, which is built without memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from onepolicy.config import ModelConfig, UsageError
from onepolicy.models.cache_size import cached_elements
from onepolicy.models.layer_kinds import layer_kinds
from onepolicy.models.load import context_length, read_config
from onepolicy.models.prepare import unknown_layers
from onepolicy.train.dry_run import decoder_layers
from onepolicy.train.memory import ModelSizes, Shapes, parameter_shapes, read_sizes


@dataclass(frozen=True, slots=True)
class Attention:
    """The costs of one decoder layer's attention, per token."""

    cached: int  # elements in an engine's cache: keys and values, or the latent of MLA
    heads: int  # key-value heads that the cache can be split over; 1 if it cannot be split
    width: int  # multiply-adds of a query with one key and value: heads * (key + value width)
    window: int | None  # tokens that a query attends to; None: all
    latent: bool = False  # MLA

    def attended(self, length: float) -> float:
        """Return how many tokens of a context of `length` are cached and read."""
        if self.window is None:
            return length
        return min(length, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims(ModelSizes):
    """The dimensions and parameter counts of a model."""

    name: str
    hidden: int
    context: int  # tokens
    routed: int  # parameters in routed experts
    embedding: int  # in the input embedding, which multiplies nothing
    outside: int  # outside decoder layers: embedding, head, norm
    largest_layer: int  # of the largest decoder layer
    layer_shapes: Shapes  # of the largest decoder layer's parameters
    attention: tuple[Attention, ...]  # of every decoder layer

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def active(self) -> float:
        """Active parameters per token; the embedding counts whole (3.3B of Qwen3-30B-A3B)."""
        return self.total - self.routed * (1 - self.expert_share)

    @property
    def multiplied(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.active - self.embedding

    @property
    def expert_share(self) -> float:
        """Share of a layer's routed experts that one token uses."""
        if not self.experts:
            return 0.0
        return self.top_k / self.experts

    @property
    def head_size(self) -> int:
        """Parameters of the output head."""
        return self.hidden * self.vocab

    def touched_share(self, tokens: float) -> float:
        """Return the expected share of routed experts that `tokens` tokens use: 1 - (1 - k/E)^n.

        Routers are taken to choose evenly.
        """
        return 1 - (1 - self.expert_share) ** tokens

    def kv_elements(self, length: float) -> float:
        """Return the cached elements of a sequence of `length` tokens."""
        return sum(layer.cached * layer.attended(length) for layer in self.attention)

    def attention_flops(self, length: float) -> float:
        """Return the FLOPs of causal attention in the forward of one sequence.

        A multiply-add is 2 FLOPs. Token t attends to min(t, window) tokens.
        """
        flops = 0.0
        for layer in self.attention:
            attended = layer.attended(length)
            flops += 2 * layer.width * (length * attended - attended * attended / 2)
        return flops

    def decode_flops(self, length: float) -> float:
        """Return the FLOPs of attention for one token that has `length` tokens before it."""
        return sum(2 * layer.width * layer.attended(length) for layer in self.attention)


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the models that ship with onepolicy, by name.

    Each is {"hub_id", "source", "config": fields of its config.json}.
    """
    folder = files("onepolicy.plan") / "models"
    models = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            name = entry.name.removesuffix(".json")
            models[name] = json.loads(entry.read_text(encoding="utf-8"))
    return models


def read_hf_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the config of a known model (by name or hub id), of a folder or of another hub id.

    Raises UsageError if there is none.
    """
    for name, entry in known_models().items():
        if model.path.lower() in (name.lower(), entry["hub_id"].lower()):
            fields = dict(entry["config"])
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
    try:
        return read_config(model)
    except UsageError as error:
        names = ", ".join(known_models())
        raise UsageError(f"{error} (known without a download: {names})") from error


def read_dims(model: PreTrainedModel, name: str) -> Dims:
    """Count the dimensions of `model`, which may be made of fake or meta tensors.

    Raises UsageError for layers that are not known.
    """
    _check_layers(model)
    text, sizes, layers = model.config.get_text_config(), read_sizes(model), decoder_layers(model)
    layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    largest = layers[layer_sizes.index(max(layer_sizes))]
    return Dims(
        **asdict(sizes),
        name=name,
        hidden=text.hidden_size,
        context=context_length(model.config),
        routed=sum(p.numel() for path, p in model.named_parameters() if is_routed(path)),
        embedding=_untied_embedding_size(model),
        outside=sizes.total - sum(layer_sizes),
        largest_layer=max(layer_sizes),
        layer_shapes=parameter_shapes(largest),
        attention=tuple(_attention(text, i) for i in range(len(layers))),
    )


def _check_layers(model: PreTrainedModel) -> None:
    """Raise UsageError for layers that are not known."""
    unknown = unknown_layers(model)
    if unknown:
        raise UsageError(
            f"model.path: {type(model).__name__} has {unknown} layers, whose memory and time "
            "onepolicy plan cannot count"
        )


def _untied_embedding_size(model: PreTrainedModel) -> int:
    """Return the parameters of the input embedding; 0 if it is tied to the output head."""
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    assert isinstance(embedding, Tensor)
    if head is embedding:
        return 0
    return embedding.numel()


def is_routed(path: str) -> bool:
    """Return whether a parameter belongs to a routed expert, in transformers' naming."""
    return ".experts." in path


def _attention(text: PreTrainedConfig, layer: int) -> Attention:
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer:
        text = per_layer[layer]
    window = _attention_window(text, layer)
    if not cached_elements(text, layer):  # a scan, or an MLP alone
        return Attention(0, 1, 0, None)
    heads = text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        key, value = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
        return Attention(
            cached_elements(text, layer), 1, heads * (key + value), window, latent=True
        )
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Attention(cached_elements(text, layer), kv_heads, 2 * heads * size, window)


def _attention_window(text: PreTrainedConfig, layer: int) -> int | None:
    """Return the tokens that a query of the layer attends to; None for all."""
    kinds = layer_kinds(text)
    if kinds:
        has_window = kinds[layer] in ("sliding_attention", "hybrid_sliding")
    else:
        has_window = getattr(text, "use_sliding_window", True)
    if not has_window:
        return None
    return getattr(text, "sliding_window", None) or None


def format_count(count: float) -> str:
    """Format a number of parameters in billions or millions: 3.3B, 3.3M."""
    if count >= 1e9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.1f}M"
