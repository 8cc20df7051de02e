"""Refusals of adapters (train.lora) that need the model, before any weights are loaded."""

from __future__ import annotations

from onepolicy.config import ModelConfig, RunConfig
from onepolicy.config.lora import LoraConfig


def check_adapters(lora: LoraConfig, config: RunConfig, model: ModelConfig) -> None:
    """Raise UsageError for adapters that cannot be trained here, or that the engine cannot use."""
    if lora.base == "nf4":
        import onepolicy.models.nf4  # noqa: F401  # raises UsageError without bitsandbytes
    if lora.sync == "native" and config.rollout.engine.kind in ("vllm", "vllm-server"):
        from onepolicy.rollout.vllm.adapter import layer_names

        layer_names(lora, model)
    if lora.sync == "native" and config.rollout.engine.kind == "sglang":
        from onepolicy.rollout.sglang.adapters import layer_names as sglang_layer_names

        sglang_layer_names(lora, model)
