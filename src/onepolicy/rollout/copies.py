"""Copies of the model with the engine's dtype, quantisation format and lm_head."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, ModelConfig, QuantFormat, RolloutConfig
from onepolicy.config.engine import LmHead
from onepolicy.models import fp32_head
from onepolicy.models.load import DTYPES, cast_model, load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.models.quant.quantise import QuantisedModel, quantise
from onepolicy.replay.layers import find_routers, is_moe
from onepolicy.rollout.vllm.quant import hf_equivalent


def load_engine_copy(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: torch.device,
    *,
    lm_head: LmHead | None = None,
    quantised: bool = True,
) -> PreTrainedModel:
    """Return the model in the engine's dtype and quantisation format, ready for packed samples.

    lm_head: None is the engine's. Static activations are not calibrated: every token has its own
    scale. The embedded engine's format stands in for vLLM's.
    """
    engine = rollout.engine
    lm_head = lm_head or engine.lm_head
    quant = None
    if quantised:
        quant = rollout.quant
    is_hf = isinstance(engine, HFEngineConfig)
    base_quant = None  # vLLM rounds weights before it quantises them
    if is_hf:
        base_quant = quant
    copy = load_engine_model(model, engine.dtype, lm_head, device, quant=base_quant)
    if quant is not None:
        _quantise_like_engine(copy, quant, is_hf=is_hf)
    dtype = DTYPES[engine.dtype]
    if lm_head == "float32":
        fp32_head.install_fp32_head(copy, dtype, field="rollout.engine.lm_head", copy=True)
    cast_model(copy, dtype)
    prepare_for_training(copy, device)
    return copy


def _quantise_like_engine(model: PreTrainedModel, quant: QuantFormat, *, is_hf: bool) -> None:
    if is_hf:
        quantise_policy(model, quant)
        return
    equivalent, experts_only = hf_equivalent(quant)
    quantise_policy(model, equivalent, experts_only=experts_only)


def load_engine_model(
    model: ModelConfig,
    dtype: str,
    lm_head: LmHead,
    device: torch.device,
    *,
    quant: QuantFormat | None = None,
) -> PreTrainedModel:
    """Load the model with weights rounded like the trainer's.

    Weights are also rounded to the engine's dtype, unless a float32 lm_head or quantised weights
    must be made from unrounded ones.
    """
    dtypes: set[str] = {model.dtype}
    if lm_head == "same" and quant is None:
        dtypes.add(dtype)
    load_dtype = "float32"
    if "bfloat16" in dtypes:
        load_dtype = "bfloat16"
    return load_model(model, DTYPES[load_dtype], device)


def quantise_policy(
    model: PreTrainedModel, quant: QuantFormat, *, experts_only: bool = False
) -> QuantisedModel:
    """Quantise the model, except its routers unless `quant` names them."""
    routers: list[str] = []
    if is_moe(model.config):
        routers = [router.path for router in find_routers(model)]
    return quantise(model, quant, routers=routers, experts_only=experts_only)
