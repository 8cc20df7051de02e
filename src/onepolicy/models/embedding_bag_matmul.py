"""Sums of weighted table rows: many products of a vector with its own small matrix, in one call.

Decoding is made of these: every sequence has its own keys, every routed token its own expert. `embedding_bag` reads the
rows of such a matrix from a table and adds them up without gathering them first; for few vectors per matrix that is
about twice as fast on a CPU as a batched matmul, whose cost per matrix is fixed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def weighted_rows(table: Tensor, index: Tensor, weight: Tensor, terms: int | None = None) -> Tensor:
    """out[b] = sum_n weight[b, n] * table[index[b, n]].

    table [R, D], contiguous; index [B, N] int32 | int64, contiguous; weight, B * N elements of any shape -> [B, D]. All
    but index in one dtype. The terms are added in order; with `terms`, at most that many at a time, then their sums.
    """
    bags, width = index.shape
    if terms is None or terms >= width:
        return _bags(
            table, index.view(-1), bag_offsets(bags, width, width, index.dtype), weight.reshape(-1)
        )
    parts = _bags(
        table, index.view(-1), bag_offsets(bags, width, terms, index.dtype), weight.reshape(-1)
    )
    return sum_rows(parts, bags)


def sum_rows(rows: Tensor, bags: int) -> Tensor:
    """[bags * n, D] -> [bags, D], the sums of n rows in their order."""
    return _bags(
        rows,
        _count(len(rows)),
        bag_offsets(bags, len(rows) // bags, len(rows) // bags, torch.int64),
        None,
    )


def _bags(table: Tensor, index: Tensor, offsets: Tensor, weight: Tensor | None) -> Tensor:
    return torch.embedding_bag(table, index, offsets, False, 0, False, weight)[0]  # 0: sum


@lru_cache(maxsize=64)
def bag_offsets(bags: int, width: int, terms: int, dtype: torch.dtype) -> Tensor:
    """Where the parts of bags of `width` begin, each of `terms` but for the last of a bag."""
    with torch.inference_mode(False):
        parts = torch.arange(0, width, terms, dtype=dtype)
        return (torch.arange(0, bags * width, width, dtype=dtype)[:, None] + parts).view(-1)


@lru_cache(maxsize=64)
def _count(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(size)
