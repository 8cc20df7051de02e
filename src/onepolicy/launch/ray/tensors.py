"""Tensors on their way through Ray, at both ends, and the engine of a replica's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ray.util import register_serializer
from torch import Tensor

from onepolicy.build import engines
from onepolicy.interfaces import NamedWeights, RolloutEngine
from onepolicy.models.load import parse_device
from onepolicy.rollout.spec import EngineSpec
from onepolicy.sync.buckets import flatten_tensors, split_into_buckets, unflatten_bucket

BUCKET_BYTES = 2**28  # a larger tensor is a bucket of its own


def build_engine(spec: EngineSpec, threads: int) -> RolloutEngine:
    """Build the engine of a replica's process, which then sends tensors as their bytes."""
    parse_device(spec.device.type)  # which this machine must have
    # torch pickles uint16 tensors, which routes are, but cannot unpickle them
    register_serializer(Tensor, serializer=bytes_of, deserializer=tensor_of)
    torch.set_num_threads(threads)
    return engines.build_engine(spec)


def bytes_of(tensor: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    """Return a tensor's bytes as an array, its dtype and its shape."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy(), tensor.dtype, tuple(tensor.shape)


def tensor_of(parts: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    """Return the tensor of `bytes_of`."""
    data, dtype, shape = parts
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def put_weights(weights: NamedWeights, put: Callable[[Any], Any]) -> list[Any]:
    """Store the weights in buckets, each as its tensors' forms and their bytes."""
    stored = []
    for bucket in split_into_buckets(weights, BUCKET_BYTES):
        forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.items()}
        stored.append(put((forms, flatten_tensors(list(bucket.values()), cpu=True).numpy())))
    return stored


def from_buckets(buckets: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `put_weights`. They belong to the engine."""
    for forms, data in buckets:
        like = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in forms.items()
        }
        yield from unflatten_bucket(torch.from_numpy(data.copy()), like).items()
