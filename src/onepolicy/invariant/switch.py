"""Which models compute with invariant operators. The operators come with `Invariant` (mode.py)."""

from __future__ import annotations

from transformers import PreTrainedModel

STATE = "_onepolicy_invariant"  # attribute of a model whose operators are invariant
TILE = 16  # rows and columns: fewer, or a remainder of one to three in a thread's share, go to a matrix-vector kernel


def is_invariant(model: PreTrainedModel) -> bool:
    """Whether this model computes with invariant operators."""
    return getattr(model, STATE, None) is not None
