"""Names of tensors in memory and in a checkpoint. Engines that load checkpoints want the latter."""

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
    """Names of a transformers model in memory -> names of its saved checkpoint, the ones vLLM and SGLang load.

    The two differ where transformers fuses tensors, as it does with the experts of a layer.
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
        self._needed = {
            name for name, _ in self._model.named_parameters()
        } | buffers  # of tied names, one

    def to_checkpoint(self, weights: NamedWeights) -> dict[str, Tensor]:
        """UsageError for a tensor the model has not, one of another shape, or one that is missing."""
        given = dict(self._checked(weights))
        return revert_weight_conversion(self._model, given)

    def stream_to_checkpoint(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        """The same one layer after the other, so that no more than a layer is held; errors come where they are met."""
        for _, layer in itertools.groupby(
            self._checked(weights), key=lambda item: layer_prefix(item[0])
        ):
            yield from revert_weight_conversion(self._model, dict(layer)).items()

    def _checked(self, weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
        missing = set(self._needed)
        for name, tensor in weights:
            if name not in self._shapes:
                raise UsageError(
                    f"load_weights: {name!r} is not a tensor of {type(self._model).__name__}"
                )
            if tuple(tensor.shape) != self._shapes[name]:
                raise UsageError(
                    f"load_weights: {name!r} has shape {tuple(tensor.shape)}, the engine's is {self._shapes[name]}"
                )
            missing.discard(name)
            yield name, tensor.detach()
        if missing:
            raise UsageError(
                f"load_weights: {len(missing)} tensors are missing, first {min(missing)!r}"
            )
