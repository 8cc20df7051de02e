"""The learner's tensors into a running vLLM, by its own reload of checkpoint tensors, plus one mend for the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from onepolicy.config import UsageError
from onepolicy.interfaces import Weights


class CheckpointNames:
    """Names of a transformers model in memory -> names of its saved checkpoint, which are the ones vLLM loads.

    The two differ where transformers fuses tensors, as it does with the experts of a layer.
    """

    def __init__(self, hf_config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=trust_remote_code)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        buffers = {name for name, _ in self._model.named_buffers()} & self._shapes.keys()
        self._needed = {name for name, _ in self._model.named_parameters()} | buffers  # of tied names, one

    def of(self, weights: Weights) -> dict[str, Tensor]:
        """UsageError for a tensor the model has not, one of another shape, or one that is missing."""
        given = {name: tensor.detach() for name, tensor in weights}
        for name, tensor in given.items():
            if name not in self._shapes:
                raise UsageError(f"load_weights: {name!r} is not a tensor of {type(self._model).__name__}")
            if tuple(tensor.shape) != self._shapes[name]:
                raise UsageError(
                    f"load_weights: {name!r} has shape {tuple(tensor.shape)}, the engine's is {self._shapes[name]}"
                )
        missing = sorted(self._needed - given.keys())
        if missing:
            raise UsageError(f"load_weights: {len(missing)} tensors are missing, first {missing[0]!r}")
        return revert_weight_conversion(self._model, given)


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
