"""The settings of `onepolicy engine serve`."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from onepolicy.config.base import SmallCount
from onepolicy.config.engine import VLLMEngineConfig, check_vllm_quant
from onepolicy.config.quant import QuantConfig


class ServeConfig(VLLMEngineConfig):
    """Settings of the vLLM server that `onepolicy engine serve` starts."""

    quant: QuantConfig = None
    """Quantisation of the weights, as rollout.quant of the runs that will use the server."""
    lora_rank: SmallCount | None = None
    """Largest rank of adapters that runs with train.lora.sync = native may send. Unset: none."""

    @model_validator(mode="after")
    def _check_quant(self) -> Self:
        if self.quant is not None:
            check_vllm_quant(self.quant, self.dtype)
        return self
