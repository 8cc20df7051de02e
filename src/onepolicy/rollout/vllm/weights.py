"""The learner's tensors into a running vLLM, by its own reload of checkpoint tensors, plus two mends."""

from __future__ import annotations

from typing import Any

from torch import nn

from onepolicy.interfaces import Weights


def reload(worker: Any, weights: Weights) -> None:
    """worker: one of vLLM's. weights: under their checkpoint names, a layer's together; read once."""
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    except BaseException:
        end_reload(worker)
        raise
    pack_experts(worker.get_model())


def end_reload(worker: Any) -> None:
    """After a reload that broke off: vLLM 0.30.0's next one would start from its leftovers, and fail or keep tensors of
    both."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)


def pack_experts(model: nn.Module) -> None:
    """Pack reloaded experts for the CPU kernel, which vLLM 0.30.0 does at the first load only.

    `UnquantizedFusedMoEMethod._setup_kernel` skips it when weights are updated, and the kernel then reads unpacked
    experts as packed ones: other values, no error.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)
