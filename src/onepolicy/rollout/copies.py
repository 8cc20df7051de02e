"""Copies of the model as the engine has it: in its dtype, its format, with its lm_head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig, ModelConfig, QuantFormat, RolloutConfig
from onepolicy.config.engine import LmHead
from onepolicy.models.load import DTYPES, cast_model, load_model
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.checks import is_moe
from onepolicy.replay.layers import find_routers

if TYPE_CHECKING:
    from onepolicy.models.quant.quantise import QuantisedModel


def load_engine_copy(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: torch.device,
    *,
    lm_head: LmHead | None = None,
    quantised: bool = True,
) -> PreTrainedModel:
    """The model in the engine's dtype and format, its lm_head too (or as said), ready for packed samples.

    Static activations are not calibrated: every token has its own scale. vLLM's format is imitated by ours.
    """
    engine, quant = rollout.engine, rollout.quant if quantised else None
    lm_head = lm_head or engine.lm_head
    own = (
        quant if isinstance(engine, HFEngineConfig) else None
    )  # vLLM rounds weights before it quantises them
    copy, dtype = (
        load_engine_model(model, engine.dtype, lm_head, device, quant=own),
        DTYPES[engine.dtype],
    )
    if own is not None:
        quantise_policy(copy, own)
    elif quant is not None:
        from onepolicy.rollout.vllm.quant import hf_equivalent

        like, experts_only = hf_equivalent(quant)
        quantise_policy(copy, like, experts_only=experts_only)
    if lm_head == "float32":
        from onepolicy.models import fp32_head

        fp32_head.install_fp32_head(copy, dtype, field="rollout.engine.lm_head", copy=True)
    cast_model(copy, dtype)
    prepare_for_training(copy, device)
    return copy


def load_engine_model(
    model: ModelConfig,
    dtype: str,
    lm_head: LmHead,
    device: torch.device,
    *,
    quant: QuantFormat | None = None,
) -> PreTrainedModel:
    """Rounded as the trainer's weights are, and as the engine's will be unless its lm_head or its quantised weights are
    made of unrounded ones."""
    dtypes = {model.dtype, dtype if lm_head == "same" and quant is None else model.dtype}
    return load_model(model, DTYPES["bfloat16" if "bfloat16" in dtypes else "float32"], device)


def quantise_policy(
    model: PreTrainedModel, quant: QuantFormat, *, experts_only: bool = False
) -> QuantisedModel:
    """`quantise`, with the model's routers left as they are unless asked for."""
    from onepolicy.models.quant.quantise import quantise

    routers = [router.path for router in find_routers(model)] if is_moe(model.config) else []
    return quantise(model, quant, routers=routers, experts_only=experts_only)
