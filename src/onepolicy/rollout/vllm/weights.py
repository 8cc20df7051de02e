"""The learner's tensors into a running vLLM, by its own reload of checkpoint tensors, plus one mend for the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def reload(llm: Any, weights: dict[str, Tensor]) -> None:
    """llm: a vLLM LLMEngine whose workers live in this process. weights: under their checkpoint names."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    llm.apply_model(pack_experts)


def pack_experts(model: nn.Module) -> None:
    """Pack reloaded experts for the CPU kernel, which vLLM 0.30.0 does at the first load only.

    `UnquantizedFusedMoEMethod._setup_kernel` skips it when weights are updated, and the kernel then reads unpacked
    experts as packed ones: other values, no error.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
