"""Tensors in buckets: several of them as one run of bytes, which a broadcast sends at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.models.checksum import ChecksumTable

ALIGN = 16  # [bytes]; a tensor of any dtype may start here


def split_into_buckets(
    named_weights: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in their order, in buckets of up to `max_bytes`.

    A larger tensor is a bucket of its own.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_weights:
        if name in bucket or (bucket and size + tensor.nbytes > max_bytes):
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach()
        size += tensor.nbytes
    if bucket:
        yield bucket


def meta_tensors(sums: ChecksumTable) -> dict[str, Tensor]:
    """Return tensors of these names, dtypes and shapes on the meta device.

    Raises TrainingError for an unknown dtype or an impossible shape.
    """
    made: dict[str, Tensor] = {}
    for name, (dtype_name, shape, _) in sums.items():
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise TrainingError(
                f"weight sync: {name!r} has the dtype {dtype_name[:40]!r}, which torch does not "
                "know"
            )
        try:
            made[name] = torch.empty(shape, dtype=dtype, device="meta")
        except (RuntimeError, TypeError, OverflowError) as error:
            raise TrainingError(f"weight sync: {name!r} has an impossible shape: {error}") from None
    return made


def unflatten_bucket(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return views of a bucket's bytes with the dtypes and shapes of `like`. flat: [size] uint8."""
    starts, _ = bucket_offsets(list(like.values()))
    return {
        name: flat[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for start, (name, t) in zip(starts, like.items(), strict=True)
    }


def bucket_offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the start of each tensor in a bucket and the bucket's size [bytes]."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(-(-end // ALIGN) * ALIGN)
        end = starts[-1] + tensor.nbytes
    return starts, end


def flatten_tensors(tensors: Sequence[Tensor], *, cpu: bool) -> Tensor:
    """Return the bytes of all tensors, [size] uint8. The bytes of a single tensor are a view."""
    data = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if len(data) == 1:
        return data[0].cpu() if cpu else data[0]
    device = data[0].device
    if cpu:
        device = torch.device("cpu")
    starts, size = bucket_offsets(tensors)
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    for start, part in zip(starts, data, strict=True):
        flat[start : start + part.numel()] = part
    return flat
