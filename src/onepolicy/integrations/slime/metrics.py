"""Metrics of a step over slime's data-parallel ranks.

slime averages what a hook leaves in `rollout_data` over ranks without weights, and expects the same
names on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.core.metrics import COUNTS, LARGEST
from onepolicy.integrations.core.step import measure_and_correct


def data_parallel_group() -> Any:
    """Return slime's group of ranks with other samples, None in a single process."""
    if not dist.is_initialized():
        return None
    from megatron.core import mpu

    return mpu.get_data_parallel_group_gloo(with_context_parallel=False)


def is_first_rank() -> bool:
    """Return whether this process speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def over_ranks(
    metrics: dict[str, float], tokens: int, correction: CorrectionConfig | None, group: Any
) -> dict[str, Tensor]:
    """Return the metrics of all ranks together: means by their tokens, sums, or the largest.

    A rank whose value is missing or not finite does not count. A metric that no rank has is left
    out, on all of them. Means over tokens are exact. Ratios of sums (`ess`, `chi2`, `pearson`) are
    means of the ranks'. All ranks of the group must call it.

    Args:
        metrics: of this rank's samples; any of the names that `measure_and_correct` gives.
        tokens: their number.
        correction: the one that reported them. The same on all ranks.
        group: of the data-parallel ranks, None for one process.
    """
    names = _names(correction)
    values = torch.tensor([metrics.get(name, torch.nan) for name in names], dtype=torch.float64)
    known = values.isfinite()
    weight = known * float(tokens)
    plain, largest = torch.where(known, values, 0.0), torch.where(known, values, -torch.inf)
    sums = torch.stack([weight, plain * weight, plain])
    if group is not None:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    weight, weighted, counted = sums
    found = {}
    for i, name in enumerate(names):
        last = name.rpartition("/")[2]
        if weight[i] == 0:
            continue
        found[name] = weighted[i] / weight[i]
        if last in LARGEST:
            found[name] = largest[i]
        elif last in COUNTS:
            found[name] = counted[i]
    return found


def _names(correction: CorrectionConfig | None) -> list[str]:
    """Return the names of the metrics of a step."""
    one = torch.zeros(1, 1)
    return list(measure_and_correct(one, one, one, one == 0, correction).metrics)
