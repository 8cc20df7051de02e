"""The order of rows: sample by sample in a trace, position by position in Megatron's routers.

A Megatron model is fed [B, S] tokens and works on [S, B, H]. Its routers see row s * B + b. With
sequence parallelism, a rank of the tensor-parallel group sees an equal run of the positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.integrations.core.layout import sequence_first
from onepolicy.types import RoutingTrace


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks among which sequence parallelism divides the positions of a batch."""

    group: Any  # process group, None without sequence parallelism
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, router: Any) -> SequenceRanks:
        """Return the ranks of a router's model."""
        if not router.config.sequence_parallel or router.tp_group.size() == 1:
            return cls(None)
        return cls(router.tp_group, router.tp_group.rank(), router.tp_group.size())

    def own_rows(self, trace: RoutingTrace, batch: int) -> RoutingTrace:
        """Return the rows of this rank's positions, sample by sample, of a trace [B * S].

        Raises:
            UsageError: the rows are not those of `batch` samples of one length, or the length is no
                multiple of the ranks.
        """
        if batch < 1 or len(trace) % batch:
            raise UsageError(
                f"replay: the trace has {len(trace)} rows, which are not those of batch={batch} "
                "samples of one length; padded tokens have rows too (op.pad_routes)"
            )
        if self.size == 1:
            return trace
        length = len(trace) // batch
        if length % self.size:
            raise UsageError(
                f"replay: {length} positions cannot be split over {self.size} ranks of sequence "
                "parallelism; pad the tokens, and the routes with invalid rows"
            )
        share = length // self.size
        rows = torch.arange(len(trace), device=trace.ids.device).view(batch, self.size, share)
        return trace.at(rows[:, self.rank].reshape(-1))

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the positions, of ids [n, L, K] int64."""
        if self.size == 1:
            return ids
        parts = [torch.empty_like(ids) for _ in range(self.size)]
        dist.all_gather(parts, ids.contiguous(), group=self.group)
        return torch.cat(parts)


def by_sample(trace: RoutingTrace, batch: int) -> RoutingTrace:
    """Return the rows [S * B] of a router, sample by sample."""
    if batch == 1:
        return trace
    return sequence_first(trace, len(trace) // batch)


def by_position(trace: RoutingTrace, batch: int) -> RoutingTrace:
    """Return the rows [B * S] of a trace, position by position, as the routers see them."""
    if batch == 1:
        return trace
    return sequence_first(trace, batch)
