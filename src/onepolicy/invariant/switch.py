"""The mark of a model that computes with invariant operators. `mode.Invariant` sets it."""

from __future__ import annotations

from transformers import PreTrainedModel

STATE = "_onepolicy_invariant"  # attribute of a model whose operators are invariant
# Rows and columns. A smaller matrix, or a remainder of one to three in a thread's part, would go to
# a matrix-vector kernel.
TILE = 16


def is_invariant(model: PreTrainedModel) -> bool:
    """Return whether this model computes with invariant operators."""
    return getattr(model, STATE, None) is not None
