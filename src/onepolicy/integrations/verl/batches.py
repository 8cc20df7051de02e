"""Tensors of a verl batch, as the library wants them."""

from __future__ import annotations

import torch
from torch import Tensor


def turns_of(mask: Tensor) -> Tensor:  # [B, R] bool -> [B, R] int64
    """Return the turn of each response token, from 0 on.

    verl's response_mask is 0 at tool replies, so a turn is a run of ones. The other tokens have the
    number of the turn before them, and 0 before the first.
    """
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    starts = mask & ~before
    return (starts.cumsum(1) - 1).clamp(min=0)
