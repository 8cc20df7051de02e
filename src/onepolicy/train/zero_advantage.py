"""Groups whose samples have no advantage, left out of the update (train.skip_zero_advantage).

The rewards of such a group are equal: it is solved by all samples, or by none. With a group
baseline and no other term in the loss its gradient is exactly 0. It is scored like the others, in
micro-batches that hold no other group: these need no graph, and the update skips them.

A step in which no group has an advantage is updated whole, so that the optimiser sees gradients of
0 and not none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onepolicy.types import TokenBatch

MicroBatches = list[list[int]]


def split_micro_batches(
    batch: TokenBatch, pack: Callable[[TokenBatch], MicroBatches]
) -> MicroBatches:
    """Return the micro-batches of groups with an outcome other than 0, then those of the others.

    A group baseline makes every slot's advantage its sample's outcome, which is known before the
    scores. pack: divides a batch into micro-batches.
    """
    live = _of_groups(batch, batch.outcome != 0)
    found: MicroBatches = []
    for chosen in (live, ~live):
        samples: list[int] = chosen.nonzero()[:, 0].tolist()
        if samples:
            parts = pack(batch.select(samples))
            found += [[samples[index] for index in part] for part in parts]
    return found


def with_advantage(batch: TokenBatch, micro_batches: MicroBatches) -> MicroBatches:
    """Return the micro-batches in which a group has an advantage; all if none has."""
    live = batch.outcome != 0
    if batch.advantage is not None:
        live = _any_of(batch.advantage != 0, batch.segment, batch.num_samples)
    live = _of_groups(batch, live)
    return [samples for samples in micro_batches if live[samples].any()] or micro_batches


def _of_groups(batch: TokenBatch, samples: Tensor) -> Tensor:
    """Return [S] bool: whether a sample of the group is True in `samples` [S] bool."""
    _, group = batch.group.unique(return_inverse=True)
    return _any_of(samples, group, int(group.max()) + 1)[group]


def _any_of(values: Tensor, unit: Tensor, units: int) -> Tensor:
    """Return [units] bool: whether a value of the unit is True. values: bool, unit: its unit."""
    return (
        torch.zeros(units, dtype=torch.int64, device=unit.device).index_add(0, unit, values.long())
        > 0
    )
