"""Conversion of a model's tensors to the names of its saved checkpoint, which engines load."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from onepolicy.config import UsageError
from onepolicy.interfaces import NamedWeights
from onepolicy.models.load import layer_prefix


class CheckpointNames:
    """A converter from a transformers model's tensors to those that vLLM and SGLang load.

    Names and shapes differ where transformers fuses tensors, as it does with a layer's experts.
    """

    def __init__(self, hf_config: PreTrainedConfig, *, trust_remote_code: bool) -> None:
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(
                hf_config, trust_remote_code=trust_remote_code
            )
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()
        }
        buffers = {name for name, _ in self._model.named_buffers()} & self._shapes.keys()
        parameters = {name for name, _ in self._model.named_parameters()}
        self._required = parameters | buffers  # one of several tied names

    def stream_to_checkpoint(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors as the checkpoint has them, holding one layer at a time.

        Raises:
            UsageError: a tensor is not of this model, has another shape, or is missing. It is
                raised when the iteration comes there.
        """
        checked = self._checked(weights)
        for _, layer in itertools.groupby(checked, key=lambda item: layer_prefix(item[0])):
            yield from revert_weight_conversion(self._model, dict(layer)).items()

    def _checked(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        missing = set(self._required)
        for name, tensor in weights:
            if name not in self._shapes:
                raise UsageError(
                    f"load_weights: {name!r} is not a tensor of {type(self._model).__name__}"
                )
            if tuple(tensor.shape) != self._shapes[name]:
                raise UsageError(
                    f"load_weights: {name!r} has shape {tuple(tensor.shape)}, the engine's is "
                    f"{self._shapes[name]}"
                )
            missing.discard(name)
            yield name, tensor.detach()
        if missing:
            raise UsageError(
                f"load_weights: {len(missing)} tensors are missing, first {min(missing)!r}"
            )
