"""The settings of `onepolicy engine serve`."""

from __future__ import annotations

from typing import ClassVar

from onepolicy.config.base import SmallCount
from onepolicy.config.engine import VLLMEngineConfig
from onepolicy.config.option_rules import vllm_quant_rules
from onepolicy.config.quant import QuantConfig
from onepolicy.config.rules import unused


class ServeConfig(VLLMEngineConfig):
    """Settings of the vLLM server that `onepolicy engine serve` starts."""

    rules: ClassVar = (
        *vllm_quant_rules(lambda engine: engine.quant, lambda engine: engine.dtype, "", ""),
        *unused(
            "lm_head",
            lambda engine: engine.lm_head == engine.dtype == "float32",
            "dtype = float32",
        ),
    )

    quant: QuantConfig = None
    """Quantisation of the weights, as the runs that use the server have it."""
    lora_rank: SmallCount | None = None
    """Largest rank of native adapters (train.lora.sync). Unset: none."""
