"""Bytes per second of each part of a weight sync, on one GPU.

4 of the 48 layers of Qwen3-30B-A3B: 1,536 matrices of experts, 3.1 MB each in bfloat16. The cast
to the engine's dtype, the conversion to the checkpoint's names, the checksums, the copy into
buckets, and the receiver's check and copy, each alone and all in a row; without the network.
Target: all together more than 50 GB/s of bytes sent. The baseline is one copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from gpu.harness import Bench
from gpu.models import make, moe
from torch import Tensor

from onepolicy.models.checkpoint_names import CheckpointNames
from onepolicy.models.checksum import ChecksumAccumulator
from onepolicy.sync.broadcast import BUCKET_BYTES
from onepolicy.sync.buckets import flatten_tensors, split_into_buckets, unflatten_bucket
from onepolicy.sync.push import SentTensors

TARGET = 50.0  # GB/s

Named = Iterable[tuple[str, Tensor]]


def main(bench: Bench) -> None:
    config = moe(bench, num_hidden_layers=bench.size(4, 2), tie_word_embeddings=False)
    model = make(config, bench, torch.float32)
    names = CheckpointNames(config, trust_remote_code=False)
    cast = dict(SentTensors(model).cast("bfloat16"))
    converted = dict(names.stream_to_checkpoint(cast.items()))
    size = sum(tensor.nbytes for tensor in cast.values())
    flat = torch.empty(size, dtype=torch.uint8, device=bench.device)
    other = torch.empty_like(flat)
    buckets = list(split_into_buckets(converted.items(), BUCKET_BYTES))
    sent = [(flatten_tensors(list(b.values()), cpu=False), b) for b in buckets]

    def whole() -> None:
        stream = names.stream_to_checkpoint(SentTensors(model).cast("bfloat16"))
        for bucket in split_into_buckets(stream, BUCKET_BYTES):
            check(bucket.items())
            receive([(flatten_tensors(list(bucket.values()), cpu=False), bucket)])

    cases: dict[str, Callable[[], object]] = {
        "one flat copy": lambda: other.copy_(flat),
        "cast": lambda: dict(SentTensors(model).cast("bfloat16")),
        "convert": lambda: dict(names.stream_to_checkpoint(cast.items())),
        "checksum": lambda: check(converted.items()),
        "buckets": lambda: [flatten_tensors(list(b.values()), cpu=False) for b in buckets],
        "receive": lambda: receive(sent),
        "all together": whole,
    }
    bench.record("shape", tensors=len(converted), gb=size / 1e9, buckets=len(buckets))
    for name, run in cases.items():
        if not bench.has_time(name, 5):
            continue
        with bench.case(name):
            measured = bench.measure(run, share=3.0)
            speed = size / measured.median / 1e9
            target = {}
            if name == "all together":
                target = {"target": TARGET}
            bench.record(
                name,
                gb_per_second=speed,
                seconds=measured.seconds,
                waits=bench.waits(run),
                **target,
            )


def check(weights: Named) -> None:
    """Compute the checksums of all tensors."""
    sums = ChecksumAccumulator(b"key")
    for name, tensor in weights:
        sums.add(name, tensor)
    sums.pop_all()


def receive(sent: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    """Check every bucket and copy its tensors out of it, as an engine that loads them does."""
    for flat, like in sent:
        tensors = unflatten_bucket(flat, like)
        check(tensors.items())
        for tensor in tensors.values():
            tensor.clone()
