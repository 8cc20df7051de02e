"""Quantisation of the rollout engine's weights. The trainer's are never quantised."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from onepolicy.config.base import Frozen

Module = Literal["router", "embeddings", "lm_head"]


class _Quant(Frozen):
    extra_modules: tuple[Module, ...] = ()
    """Modules to quantise besides attention, MLP and experts. Norms are never quantised."""


class Int8(_Quant):
    """Weights and activations in int8, products summed in int32 (W8A8), a scale per output channel.

    With vLLM the weights of experts only.
    """

    format: Literal["int8"] = "int8"
    """Weights and activations in int8. With vLLM: weights of experts only."""
    activations: Literal["dynamic", "static"] = "dynamic"
    """Scales of activations: one per token, or one per layer, calibrated on the policy at the
    start."""


class Fp8(_Quant):
    """Weights and activations in float8 e4m3, one scale per output channel and per token."""

    format: Literal["fp8"] = "fp8"
    """Weights and activations in float8 e4m3."""


class Fp8Weight(_Quant):
    """Weights in float8 e4m3, activations in the engine's dtype (W8A16)."""

    format: Literal["fp8-weight"] = "fp8-weight"
    """Weights in float8 e4m3, activations in the engine's dtype."""


class Simulated(_Quant):
    """Weights rounded to `bits` bits and kept in the engine's dtype, to test corrections.

    It has the error of a format without its speed or size.
    """

    format: Literal["simulated"] = "simulated"
    """Weights rounded to `bits` bits and kept in the engine's dtype, to test corrections."""
    bits: int = Field(4, ge=2, le=8)
    """Bits of a weight. Symmetric, one scale per output channel."""


def _named(value: Any) -> Any:
    """Return the section of a bare name: "int8" is {format = "int8"}, "off" is none."""
    if value == "off":
        return None
    if isinstance(value, str):
        return {"format": value}
    return value


QuantFormat = Annotated[Int8 | Fp8 | Fp8Weight | Simulated, Field(discriminator="format")]
QuantConfig = Annotated[QuantFormat | None, BeforeValidator(_named)]
