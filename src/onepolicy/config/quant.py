"""How the rollout engine's weights are quantised. The trainer's never are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from onepolicy.config.base import Frozen

Part = Literal["router", "embeddings", "lm_head"]


class _Quant(Frozen):
    extra_modules: tuple[Part, ...] = ()
    """Quantised as well as attention, MLP and experts; by default these stay in the engine's dtype. Norms always do."""


class Int8(_Quant):
    """Weights and activations in int8, products summed in int32 (W8A8). Weights: one scale per output channel.

    With vLLM the weights of experts only.
    """

    format: Literal["int8"] = "int8"
    activations: Literal["dynamic", "static"] = "dynamic"
    """dynamic: one scale per token, from the token; static: one per layer, calibrated once on the policy that the run
    starts from and kept for every later step."""


class Fp8(_Quant):
    """Weights and activations in float8 e4m3, one scale per output channel and per token."""

    format: Literal["fp8"] = "fp8"


class Fp8Weight(_Quant):
    """Weights in float8 e4m3, activations in the engine's dtype (W8A16)."""

    format: Literal["fp8-weight"] = "fp8-weight"


class Simulated(_Quant):
    """Weights rounded to `bits` bits and kept in the engine's dtype: the error of a format without its speed or size.

    For pressure tests of corrections.
    """

    format: Literal["simulated"] = "simulated"
    bits: int = Field(4, ge=2, le=8)
    """Symmetric, one scale per output channel."""


def _named(value: Any) -> Any:
    """quant = "int8" means quant.format = "int8"; "off" means none."""
    if value == "off":
        return None
    return {"format": value} if isinstance(value, str) else value


QuantFormat = Annotated[Int8 | Fp8 | Fp8Weight | Simulated, Field(discriminator="format")]
QuantConfig = Annotated[QuantFormat | None, BeforeValidator(_named)]
