"""Products of vectors with a small matrix each, in one call of torch's `embedding_bag`.

Decoding consists of such products: every sequence has its own keys, every routed token its own
expert. `embedding_bag` reads the rows of these matrices from a table and adds them up without
gathering them first. With few vectors per matrix this is about twice as fast on a CPU as a batched
matmul, whose cost per matrix is fixed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def weighted_rows(table: Tensor, index: Tensor, weight: Tensor, terms: int | None = None) -> Tensor:
    """Compute out[b] = sum_n weight[b, n] * table[index[b, n]].

    Args:
        table: [R, D], contiguous.
        index: [B, N] int32 or int64, contiguous.
        weight: B * N elements in any shape, in the table's dtype.
        terms: add at most that many terms at a time, then add those sums. None adds all terms, in
            their order.

    Returns:
        [B, D] in the table's dtype.
    """
    bags, width = index.shape
    if terms is None or terms >= width:
        terms = width
    offsets = bag_offsets(bags, width, terms, index.dtype)
    parts = _embedding_bag(table, index.view(-1), offsets, weight.reshape(-1))
    if terms >= width:
        return parts
    return sum_rows(parts, bags)


def sum_rows(rows: Tensor, bags: int) -> Tensor:
    """Return the sums [bags, D] of every n consecutive rows of [bags * n, D], in their order."""
    width = len(rows) // bags
    offsets = bag_offsets(bags, width, width, torch.int64)
    return _embedding_bag(rows, _arange(len(rows)), offsets, None)


@lru_cache(maxsize=64)
def bag_offsets(bags: int, width: int, terms: int, dtype: torch.dtype) -> Tensor:
    """Return the first index of every part, for bags of `width` terms in parts of `terms`.

    The last part of a bag may be smaller.
    """
    with torch.inference_mode(False):
        parts = torch.arange(0, width, terms, dtype=dtype)
        return (torch.arange(0, bags * width, width, dtype=dtype)[:, None] + parts).view(-1)


@lru_cache(maxsize=64)
def _arange(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(size)


def _embedding_bag(table: Tensor, index: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    return torch.embedding_bag(table, index, offsets, False, 0, False, weight)[0]  # mode 0: sum
