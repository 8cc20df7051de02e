"""The layers of a model that decode as functions (`plain_layer.py`), and their operators.

Whether a layer is plain is not looked up but tried: it must compute the same bits both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from onepolicy.invariant import attention as invariant_attention
from onepolicy.invariant import ops
from onepolicy.invariant.experts import invariant_experts
from onepolicy.invariant.mode import InvariantLinear
from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.models import decode_attention
from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.decode_experts import expert_activation, expert_weights, weighted_experts
from onepolicy.models.linear import is_plain_linear
from onepolicy.rollout.hf.kv_cache import KVCache
from onepolicy.rollout.hf.plain_layer import PROJECTIONS, Operators, PlainLayer, Rotation

ATTENTION = {*PROJECTIONS, "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
NORMS = {"input_layernorm", "post_attention_layernorm"}


def use_plain_layers(model: PreTrainedModel, cache: KVCache) -> None:
    """Let every plain layer of the model decode by functions. Names and hooks stay the same.

    The weights of its queries, keys and values become views of one tensor.
    """
    rotation, operators = Rotation(), FAST
    if is_invariant(model):
        operators = ON_POLICY
    for layer in list(model.modules()):
        if not _looks_plain(layer):
            continue
        plain = PlainLayer(layer, rotation, operators)
        if computes_these_bits(plain, layer, cache):
            plain.share_weights()
            if operators is ON_POLICY:
                parts = [projection.weight for projection in plain.projections]
                ops.keep_parts_in_float32(plain.weight, parts)
            layer.__dict__["forward"] = plain


def _looks_plain(layer: nn.Module) -> bool:
    """Return whether the layer has the parts of a plain one, and no others."""
    children = dict(layer.named_children())
    if children.keys() != {"self_attn", "mlp", *NORMS}:
        return False
    attention = layer.get_submodule("self_attn")
    parts = dict(attention.named_children())
    head_norms = [parts[name] for name in HEAD_NORMS & parts.keys()]
    norms = [*head_norms, *(children[name] for name in NORMS)]
    width = getattr(attention, "head_dim", None)
    return (
        parts.keys() in (ATTENTION, ATTENTION | HEAD_NORMS)
        and not list(attention.parameters(recurse=False))
        and not list(attention.buffers())
        and all(_is_linear(parts[name]) for name in ATTENTION)
        and len({getattr(parts[name], "bias", None) is None for name in PROJECTIONS}) == 1
        and all(isinstance(getattr(norm, "variance_epsilon", None), float) for norm in norms)
        and all([name for name, _ in norm.named_parameters()] == ["weight"] for norm in norms)
        and isinstance(width, int)
        and all(norm.weight.shape == (width,) for norm in head_norms)
        and isinstance(getattr(attention, "scaling", None), float)
    )


def _is_linear(module: nn.Module) -> bool:
    return is_plain_linear(module) or type(module) is InvariantLinear


@torch.inference_mode()
def computes_these_bits(plain: PlainLayer, layer: nn.Module, cache: KVCache) -> bool:
    """Return whether the function and the layer compute the same bits.

    They are tried on a sequence's second position and on the cache's last one, so that windows and
    scales that depend on the position show.
    """
    weight = plain.weight
    last = cache.max_len - 1
    step = KVCacheStep(
        torch.arange(2, device=weight.device),
        torch.tensor([1, last], device=weight.device),
        cache.max_len,
        slice(0, 2),
    )
    step.round_keys(plain.operators.key_multiple)
    random = torch.Generator("cpu").manual_seed(0)
    hidden = torch.randn(1, 2, weight.shape[1], generator=random, device="cpu").to(weight)
    angles = torch.randn(1, 2, plain.head_dim // 2, generator=random, device="cpu").to(weight)
    angles = torch.cat([angles, angles], -1)

    def run(forward: Callable[..., Any]) -> Any:
        scratch = KVCache(2, cache.max_len, device=cache.device, dtype=cache.dtype)
        scratch.set_step(step)
        return forward(
            hidden.clone(),
            attention_mask=None,
            position_ids=step.positions[None],
            position_embeddings=(angles.cos(), angles.sin()),
            past_key_values=scratch,
            use_cache=True,
            kv_cache_step=step,
        )

    try:
        theirs, ours = run(layer.forward), run(plain)
    except (RuntimeError, TypeError, ValueError):  # a router or an MLP of another kind
        return False
    return isinstance(theirs, Tensor) and torch.equal(theirs, ours)


def _weighted_experts(experts: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return partial(weighted_experts, expert_weights(experts), expert_activation(experts))


def _invariant_experts(experts: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return partial(invariant_experts, experts)


FAST = Operators(
    decode_attention.NAME, 1, F.linear, decode_attention.attend_to_cache, _weighted_experts
)
ON_POLICY = Operators(
    invariant_attention.NAME,
    TILE,
    ops.linear,
    invariant_attention.attend_to_cache,
    _invariant_experts,
)
