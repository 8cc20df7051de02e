"""Start-up: what the invariant operators rest on are properties of this build of torch, so they are checked."""

from __future__ import annotations

from transformers import PreTrainedModel

from onepolicy.invariant.mode import install


def start(model: PreTrainedModel) -> None:
    """Make this model invariant for the rest of its life."""
    install(model)
