"""Checkpoints whose weights are stored in a quantised format: dequantised, or refused by name."""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import Mxfp4Config

from onepolicy.config import UsageError


def dequantisation(path: str, stored: Any) -> Mxfp4Config:
    """Return the setting with which transformers dequantises the weights while it loads them.

    stored: quantization_config of the model's config. MXFP4 (gpt-oss) is dequantised: otherwise it
    depends on an installed package whether the experts are loaded packed, which no gradient
    reaches. Raises UsageError for other formats, whose layers do not train.
    """
    fields = stored
    if not isinstance(stored, dict):
        fields = stored.to_dict()
    method = str(fields.get("quant_method"))
    if method != "mxfp4":
        raise UsageError(
            f"model.path: the weights of {path} are stored in {method}, which cannot be trained; "
            "give a copy in bfloat16"
        )
    return Mxfp4Config(dequantize=True)
