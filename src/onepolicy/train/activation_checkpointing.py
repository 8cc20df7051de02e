"""Recompute of activations in the backward (train.activation_checkpointing)."""

from __future__ import annotations

import re

from torch import nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError

RANDOM = re.compile("drop|jitter|noise")
"""Attributes of a layer that make its forward random in train mode if they are not 0."""


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make every layer keep its input only.

    Raises UsageError for a family that cannot, or whose layers would draw numbers.
    """
    if not model.supports_gradient_checkpointing:
        raise UsageError(
            f"train.activation_checkpointing: transformers has none for {type(model).__name__}; "
            "set it to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.eval()
    # transformers checkpoints in train mode only. Dropout and jitter of what layers hold stay off,
    # or the trainer's policy would not be the policy that is measured.
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            _refuse_randomness(layer)
            layer.training = True


def _refuse_randomness(layer: nn.Module) -> None:
    """Raise UsageError if the layer itself computes something else in train mode."""
    for name, value in vars(layer).items():
        if RANDOM.search(name) and type(value) in (int, float) and value:
            raise UsageError(
                f"model.path: {type(layer).__name__} has {name}={value} from the config; "
                "checkpointing activations needs 0"
            )
