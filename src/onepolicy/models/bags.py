"""Sums of weighted table rows: many products of a vector with its own small matrix, in one call.

Decoding is made of these: every sequence has its own keys, every routed token its own expert. `embedding_bag` reads the
rows of such a matrix from a table and adds them up without gathering them first; for few vectors per matrix that is
about twice as fast on a CPU as a batched matmul, whose cost per matrix is fixed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def weighted_rows(table: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """out[b] = sum_n weight[b, n] * table[index[b, n]].

    table [R, D], contiguous; index [B, N] int32 | int64, contiguous; weight, B * N elements of any shape -> [B, D]. All
    but index in one dtype.
    """
    offsets = _offsets(*index.shape, index.dtype)
    return torch.embedding_bag(table, index.view(-1), offsets, False, 0, False, weight.reshape(-1))[0]  # 0: sum


@lru_cache(maxsize=64)
def _offsets(bags: int, width: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, bags * width, width, dtype=dtype)
