"""Recompute of activations in the backward (train.activation_checkpointing)."""

from __future__ import annotations

from transformers import PreTrainedModel

from onepolicy.config import UsageError

RANDOM_SETTINGS = (
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
    "attn_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
    "input_jitter_noise",
    "moe_jitter_eps",
)
"""Settings of transformers' configs that make a forward in train mode random if they are not 0."""


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make every layer keep its input only. Raises UsageError for a model that draws numbers."""
    refuse_randomness(model)
    settings = {"use_reentrant": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    model.train()  # transformers checkpoints activations in train mode only


def refuse_randomness(model: PreTrainedModel) -> None:
    """Raise UsageError if the model computes something else in train mode than in eval mode.

    Otherwise the trainer's policy would not be the policy that is measured.
    """
    config = model.config.get_text_config()
    for name in RANDOM_SETTINGS:
        value = getattr(config, name, 0)
        if value:
            raise UsageError(
                f"model.path: {name}={value} in the config; checkpointing activations needs 0"
            )
