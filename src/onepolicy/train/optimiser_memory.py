"""Bytes of AdamW's state on a rank, where `optim.state` lets it rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from onepolicy.config import RunConfig
from onepolicy.train.eight_bit_adamw import BLOCK, SLICE
from onepolicy.train.streamed_adamw import BUCKET_BYTES, STATE_BYTES

Shapes = tuple[tuple[int, int], ...]  # (rows, elements of a row) of parameters
FLOAT32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2}
ROUNDING = 40  # bytes for each element of a slice while torchao rounds it: indices are int64
STREAMED_BUCKETS = 3  # one comes, one is computed, one goes (train/streamed_adamw.py)


def parameter_shapes(module: nn.Module) -> Shapes:
    """Return the rows of all parameters and the elements of a row."""
    return tuple((len(p), p.numel() // len(p)) for p in module.parameters())


def shard_sizes(shapes: Shapes, ranks: int) -> list[int]:
    """Return the elements of each parameter on one rank.

    FSDP2 divides the rows (the first dimension) and pads every rank's share to the largest. A row
    of three-dimensional experts is a whole expert.
    """
    return [math.ceil(rows / ranks) * width for rows, width in shapes]


@dataclass(frozen=True, slots=True)
class OptimiserMemory:
    """Bytes of one rank's moments and masters."""

    moments: float  # on the device between updates
    masters: float  # on the device, float32 behind bfloat16 parameters
    # moments and masters in the host's memory: page-locked, so each tensor takes a power of two
    host: float
    working: float  # on the device, most at once in an update beside the above
    moved: float = 0.0  # in an update from the host to the device, and as many back


def optimiser_memory(
    shapes: Shapes, config: RunConfig, ranks: int, *, cpu: bool, one_memory: bool
) -> OptimiserMemory:
    """Compute the bytes of AdamW's state.

    shapes: of the parameters. one_memory: they are in the host's memory anyway, so nothing is
    moved there.
    """
    shards, itemsize = shard_sizes(shapes, ranks), ITEMSIZE[config.model.dtype]
    shard, largest = sum(shards), max(shards)
    moments, masters, widened = 2 * FLOAT32 * shard, 0.0, FLOAT32 - itemsize
    if widened:
        masters = FLOAT32 * shard
    if config.optim.state == "device":  # all gradients are converted to float32 at once
        return OptimiserMemory(moments, masters, 0.0, shard * widened)
    bucket = min(shard, max(BUCKET_BYTES / STATE_BYTES, largest))
    if config.optim.state == "8bit":
        rounded = shard * 2 * (1 + FLOAT32 / BLOCK)
        rounding = ROUNDING * min(SLICE, largest)
        return OptimiserMemory(rounded, masters, 0.0, bucket * (2 * FLOAT32 + widened) + rounding)
    if one_memory:
        return OptimiserMemory(moments, masters, 0.0, bucket * widened)
    buckets = 1 if cpu else min(STREAMED_BUCKETS, math.ceil(shard / bucket))
    moved = moments + masters
    state = moved / shard
    host = moved
    if not cpu:
        host = state / FLOAT32 * sum(1 << (FLOAT32 * size - 1).bit_length() for size in shards)
    return OptimiserMemory(0.0, 0.0, host, bucket * (buckets * state + widened), moved)
