"""Inverse transform sampling from a large vocabulary on a CPU, by blocks of tokens.

A float64 running sum over 152k tokens takes twice the time of their softmax. Here a float32 sum of
each block decides the block, and a float64 running sum within it decides the token. A block's
probability then has float32's rounding, as the probabilities themselves have.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512
"""Tokens of a block."""


def invert_cdf(probability: Tensor, uniform: Tensor) -> Tensor:
    """Return [B, 1] int64, the token of each row at which the running sum passes `uniform`.

    A token of probability 0 is never returned. probability: [B, V] float32. uniform: [B] float64
    in [0, 1).
    """
    size = probability.shape[1]
    whole = size // BLOCK * BLOCK
    sums = probability[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    sums = torch.cat([sums, probability[:, whole:].sum(-1, keepdim=True)], -1).double()
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=sums.shape[1] - 1)
    begins = ends.gather(-1, block) - sums.gather(-1, block)
    part = ((target - begins) / sums.gather(-1, block)).clamp_(0, 1)
    # the last block may be shorter: zeros fill it up
    columns = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = probability.gather(-1, columns.clamp(max=size - 1)).double()
    inside = inside.masked_fill_(columns >= size, 0).cumsum_(-1)
    # a part of 1 - 2**-53 may round to the whole, which no running sum passes
    below = torch.minimum(part * inside[:, -1:], inside[:, -1:].nextafter(torch.zeros_like(part)))
    return block * BLOCK + torch.searchsorted(inside, below, right=True)
