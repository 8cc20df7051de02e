"""A model without weights, for learners whose ranks share them and for arithmetic on sizes."""

from __future__ import annotations

from transformers import PreTrainedModel

from onepolicy.config import ModelConfig
from onepolicy.models.foreign import on_meta
from onepolicy.models.load import DTYPES, dequantisation_of, dtype_of, read_config


def empty_model(model: ModelConfig) -> PreTrainedModel:
    """Return the model on the meta device: names, dtypes, shapes and config without weights.

    They are those of the loaded model, whose weights are plain although the checkpoint's may be
    stored in another format.
    """
    config = read_config(model)
    if dequantisation_of(model, config):
        del config.quantization_config
    empty = on_meta(config, trust_remote_code=model.trust_remote_code, dtype=DTYPES[model.dtype])
    for name, tensor in empty.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(dtype_of(empty, name, tensor.dtype))
    empty.config.architectures = [type(empty).__name__]
    empty.config.dtype = DTYPES[model.dtype]
    return empty
