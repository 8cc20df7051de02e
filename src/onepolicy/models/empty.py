"""A model without weights, for learners whose ranks share them and for arithmetic on sizes."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from onepolicy.config import ModelConfig
from onepolicy.models.load import DTYPES, dequantisation_of, read_config


def empty_model(model: ModelConfig) -> PreTrainedModel:
    """Return the model on the meta device: names, shapes and config without weights.

    They are those of the loaded model, whose weights are plain although the checkpoint's may be
    stored in another format.
    """
    config = read_config(model)
    if dequantisation_of(model, config):
        del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            config,
            trust_remote_code=model.trust_remote_code,
            dtype=DTYPES[model.dtype],
        )
    empty.config.architectures = [type(empty).__name__]
    empty.config.dtype = DTYPES[model.dtype]
    return empty
