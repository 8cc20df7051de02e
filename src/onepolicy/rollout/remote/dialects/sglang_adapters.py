"""The layers that adapters on a SGLang server may be on (train.lora.sync = native)."""

from __future__ import annotations

from onepolicy.config import ModelConfig, UsageError
from onepolicy.config.lora import LoraConfig
from onepolicy.sync.adapters import linear_layers

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Layers that may have an adapter here -> SGLang's layer that they are part of."""


def layer_names(config: LoraConfig, model: ModelConfig) -> list[str]:
    """Return the last part of the name of every layer with an adapter, such as `q_proj`.

    Raises UsageError for targets that were never run in SGLang. It would put adapters on the
    experts too where it has them on a dense MLP.
    """
    names = linear_layers(
        config,
        model,
        refused=("experts", "routers", "dense"),
        reason="are not sent to SGLang here (its CPU kernels of experts take none)",
    )
    unknown = [name for name in names if name not in FUSED]
    if unknown:
        raise UsageError(
            f"train.lora.sync: native, but adapters on {', '.join(unknown)} were never run in "
            "SGLang; use train.lora.sync = merged"
        )
    return names


def missing_layers(layers: list[str], taken: set[str]) -> list[str]:
    """Return the layers on which a server takes no adapter. taken: names that it has for others."""
    fused = {FUSED.get(name, name) for name in taken}
    return [name for name in layers if FUSED[name] not in fused and "all" not in fused]
