"""A plain decoder layer as functions, for decoding on a CPU.

A decode step of a small model is hundreds of calls of a few microseconds. A plain decoder layer
(Llama, Qwen3, Qwen3-MoE, Mixtral without a window) needs fewer: the queries, keys and values of a
token are one product, their norms and rotations are one each. A dense MLP and the router stay
modules, and so does everything outside the layers. Prefills run the layer's own forward. With many
rows the modules may multiply with oneDNN (`models/linear.py`) and the functions do not: equal to
rounding. With on-policy numerics both multiply with `invariant/ops.py`: equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.decode_experts import holds_experts
from onepolicy.rollout.hf.kv_cache import KVCache

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Operators:
    """The functions that a plain layer computes with."""

    attention: str  # name of the attention of a model that computes with them
    key_multiple: int  # of the keys that a step reads
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    attend: Callable[..., Tensor]
    """[T, heads, D] of query [T, heads, D], key, value, step; window=, scale=, sinks=."""
    experts: Callable[[nn.Module], Callable[[Tensor, Tensor, Tensor], Tensor]]
    """Of a module of experts: hidden [T, H], ids [T, K] and weights [T, K] -> [T, H]."""


class PlainLayer:
    """A stand-in for the `forward` of one decoder layer."""

    def __init__(self, layer: nn.Module, rotation: Rotation, operators: Operators) -> None:
        self.operators = operators
        attention: Any = layer.get_submodule("self_attn")
        self._own, self._rotation, self._attention = layer.forward, rotation, attention
        self.head_dim: int = attention.head_dim
        self._index: int = attention.layer_idx
        self.projections: list[Any] = [getattr(attention, name) for name in PROJECTIONS]
        self._widths = [len(projection.weight) for projection in self.projections]
        self._heads, self._groups = (width // self.head_dim for width in self._widths[:2])
        self.weight = torch.cat([projection.weight for projection in self.projections])
        self._bias: Tensor | None = None
        if self.projections[0].bias is not None:
            self._bias = torch.cat([projection.bias for projection in self.projections])
        self._out: Any = attention.o_proj
        self._before, self._after = (
            layer.get_submodule(n) for n in ("input_layernorm", "post_attention_layernorm")
        )
        self._head_norms = [
            attention.get_submodule(n) for n in ("q_norm", "k_norm") if hasattr(attention, n)
        ]
        self._mlp = layer.get_submodule("mlp")
        self._experts = _plain_experts(self._mlp, operators)
        # Modules that are not called. A hook of one of these needs the layer's own forward.
        inside = [self._before, self._after, *attention.modules()]
        if self._experts is not None:
            inside += self._mlp.modules()
        self._hooks = [hooks for m in inside for hooks in (m._forward_pre_hooks, m._forward_hooks)]

    def share_weights(self) -> None:
        """Make the weights of the projections views of one tensor, into which a sync writes."""
        bias: tuple[Tensor, ...] | None = None
        if self._bias is not None:
            bias = self._bias.split(self._widths)
        for i, weight in enumerate(self.weight.split(self._widths)):
            projection = self.projections[i]
            projection.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                projection.bias = nn.Parameter(bias[i], requires_grad=False)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        step: Any = kwargs.get("kv_cache_step")
        cache: Any = kwargs.get("past_key_values")
        decodes = isinstance(cache, KVCache) and step is not None and step.queries is None
        if args or not decodes or not self._is_decoding(kwargs):
            return self._own(hidden_states, *args, **kwargs)
        assert isinstance(cache, KVCache), "a decode step has one"
        return self._decode(hidden_states, kwargs["position_embeddings"], cache, step)

    def _is_decoding(self, kwargs: dict[str, Any]) -> bool:
        """Return whether a decode step may skip the modules that it would call."""
        cos = kwargs["position_embeddings"][0]
        implementation = self._attention.config._attn_implementation
        return (
            not any(self._hooks)
            and cos.shape[-1] == self.head_dim
            and implementation == self.operators.attention
            and not torch.is_grad_enabled()
        )

    def _decode(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache, step: KVCacheStep
    ) -> Tensor:
        """Return the layer's output [1, T, H] for hidden [1, T, H], one token per sequence."""
        linear = self.operators.linear
        x = _norm(hidden[0], self._before)
        x = linear(x, self.weight, self._bias).view(len(x), -1, self.head_dim)
        heads, rotated = self._heads, self._heads + self._groups
        queries_keys = x[:, :rotated]
        if self._head_norms:
            queries_keys = self._norm_heads(queries_keys)
        queries_keys = self._rotation.apply(queries_keys, *rope)
        cache.write_tokens(self._index, queries_keys[:, heads:], x[:, rotated:])
        key, value = cache.read_tokens(self._index)
        scale = self._attention.scaling
        out = self.operators.attend(
            queries_keys[:, :heads], key, value, step, window=None, scale=scale, sinks=None
        )
        out = linear(out.flatten(1), self._out.weight, self._out.bias)
        hidden = hidden + out
        x = _norm(hidden, self._after)
        if self._experts is None:
            return hidden + self._mlp(x)
        return self._experts(x[0]).add_(hidden[0])[None]

    def _norm_heads(self, x: Tensor) -> Tensor:
        """Return the norms of queries and keys, x [T, heads + groups, D]."""
        norms: list[Any] = self._head_norms
        normed = _normed(x, norms[0].variance_epsilon)
        normed[:, : self._heads].mul_(norms[0].weight)
        normed[:, self._heads :].mul_(norms[1].weight)
        return normed


class PlainExperts:
    """A router and the experts that it selects, without their block."""

    def __init__(self, router: nn.Module, experts: Callable[..., Tensor]) -> None:
        self._router, self._experts = router, experts

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, H] of x [T, H]. The router's forward may be a recorder's."""
        _, combine_weights, ids = self._router.forward(x)
        return self._experts(x, ids, combine_weights)


def _plain_experts(block: nn.Module, operators: Operators) -> PlainExperts | None:
    """Return the router and experts of a block that has only these, else None."""
    parts = dict(block.named_children())
    if parts.keys() != {"gate", "experts"} or not holds_experts(parts["experts"]):
        return None
    return PlainExperts(parts["gate"], operators.experts(parts["experts"]))


class Rotation:
    """The rotary embedding of one step's tokens, whose sines all layers share."""

    def __init__(self) -> None:
        self._of: Tensor | None = None  # the sines that `_signed` was made of
        self._signed = torch.empty(0, device="cpu")

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x cos + rotate_half(x) sin. x [T, heads, D], cos and sin [1, T, D]."""
        half = x.shape[-1] // 2
        if self._of is not sin:
            signed = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
            self._of, self._signed = sin, signed[:, None]
        return (x * cos[0, :, None]).add_(x.roll(half, -1).mul_(self._signed))


def _norm(x: Tensor, norm: Any) -> Tensor:
    """Return the norm's output, as transformers' RMSNorm computes it."""
    return _normed(x, norm.variance_epsilon).mul_(norm.weight)


def _normed(x: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) of each row in a new tensor, computed in float32."""
    wide = x.float()
    reciprocal = wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * reciprocal).to(x.dtype)
