"""Metrics of a step over slime's data-parallel ranks.

slime averages what a hook leaves in `rollout_data` over ranks without weights, and expects the same
names on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.integrations.core.metrics import LARGEST
from onepolicy.integrations.core.step import measure_and_correct


def over_ranks(
    metrics: dict[str, float], tokens: int, correction: CorrectionConfig | None
) -> dict[str, Tensor]:
    """Return the metrics of all ranks together: means by their tokens, or the largest.

    Means over tokens are exact. Ratios of sums (`ess`, `chi2`, `pearson`) are means of the ranks'.
    All ranks of the data-parallel group must call it.

    Args:
        metrics: of this rank's samples; empty without tokens.
        tokens: their number.
        correction: the correction that reported them, for the names on a rank without tokens.
    """
    if not tokens:
        one = torch.zeros(1, 1)
        metrics = measure_and_correct(one, one, one, one == 0, correction).metrics
    values = torch.tensor(list(metrics.values()), dtype=torch.float64)
    weight = torch.tensor(float(tokens), dtype=torch.float64)
    sums, largest = values * weight, values
    if not tokens:
        sums, largest = torch.zeros_like(values), torch.full_like(values, -torch.inf)
    if torch.distributed.is_initialized():
        from megatron.core import mpu

        group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
        for part in (sums, weight):
            torch.distributed.all_reduce(part, group=group)
        largest = largest.clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    found = {}
    for i, name in enumerate(metrics):
        found[name] = sums[i] / weight
        if name.rpartition("/")[2] in LARGEST:
            found[name] = largest[i]
    return found
