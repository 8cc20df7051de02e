"""Tensors -> one run of bytes and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.sync.checksum import Sums

ALIGN = 16  # every dtype may start at such a byte


def in_buckets(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[dict[str, Tensor]]:
    """In their order, a bucket as full as `most` bytes allow; a larger tensor is a bucket of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if name in bucket or (bucket and size + tensor.nbytes > most):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach()
        size += tensor.nbytes
    if bucket:
        yield bucket


def likes(sums: Sums) -> dict[str, Tensor]:
    """Tensors of these names, dtypes and shapes without bytes. TrainingError for what no tensor can be."""
    found: dict[str, Tensor] = {}
    for name, (dtype, shape, _) in sums.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise TrainingError(f"weight sync: {name!r} is to have dtype {dtype[:40]!r}, which is none")
        try:
            found[name] = torch.empty(shape, dtype=kind, device="meta")
        except (RuntimeError, TypeError, OverflowError) as error:
            raise TrainingError(f"weight sync: {name!r} is to have a shape that none has: {error}") from None
    return found


def split(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of a bucket's bytes."""
    starts, _ = places(list(like.values()))
    return {
        name: flat[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, (name, t) in zip(starts, like.items(), strict=True)
    }


def places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each starts in a bucket, and the bucket's size [bytes]."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(-(-end // ALIGN) * ALIGN)
        end = starts[-1] + tensor.nbytes
    return starts, end


def flattened(tensors: Sequence[Tensor], *, cpu: bool) -> Tensor:
    """All their bytes, [size] uint8; a view of a tensor that is alone."""
    data = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len(data) == 1:
        return data[0].cpu() if cpu else data[0]
    starts, size = places(tensors)
    flat = torch.empty(size, dtype=torch.uint8, device="cpu" if cpu else data[0].device)
    for start, part in zip(starts, data, strict=True):
        flat[start : start + part.numel()] = part
    return flat
