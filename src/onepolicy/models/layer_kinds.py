"""The kinds of decoder layers by the names that configs use, and how each keeps earlier tokens."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig


class LayerKind(NamedTuple):
    """The things that layers of a kind keep of earlier tokens."""

    attends: bool  # keys and values of every token
    recurrent: bool  # a state that goes from token to token


ATTENTION, RECURRENT = LayerKind(True, False), LayerKind(False, True)
LAYER_KINDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "attention"), ATTENTION),
    **dict.fromkeys(("linear_attention", "conv", "mamba", "recurrent"), RECURRENT),
    **dict.fromkeys(("hybrid", "hybrid_sliding"), LayerKind(True, True)),
    **dict.fromkeys(("moe", "mlp"), LayerKind(False, False)),
}


def layer_kinds(text: PreTrainedConfig) -> list[str]:
    """Return the kind of every decoder layer; [] if the config does not say. text: of the LM."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return list(kinds or [])
