"""What saving a checkpoint takes: bytes, seconds on the run folder's disk, host memory."""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.config import RunConfig
from onepolicy.plan.dims import Dims
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.memory import BYTES, FLOAT32


@dataclass(frozen=True, slots=True)
class Save:
    size: float  # bytes: parameters, AdamW, masters; a critic counts as a second policy
    staged: float  # bytes of a node's own memory that its ranks' shards are copied to, until they are written
    written: float  # seconds; ranks write at the same time, into one folder
    counts: float  # seconds until it is complete: sharded weights are also read and written again, all files hashed
    limit: float | None  # seconds that the ranks have for writing (train.rank_timeout)

    @property
    def in_time(self) -> bool:
        return self.limit is None or self.written <= self.limit


def save_of(dims: Dims, config: RunConfig, cluster: Cluster, ranks: int) -> Save:
    """All ranks share the bandwidth of one folder (`disk`). One rank writes from where its tensors are."""
    own = BYTES[config.model.dtype]
    each = own + 2 * FLOAT32 + FLOAT32 * (config.model.dtype == "bfloat16")
    size = dims.total * each * (1 + (config.objective.critic is not None))
    written, disk = size / cluster["disk"], cluster["disk"]
    if ranks == 1:
        return Save(size, 0.0, written, 2 * written, None)
    again = 2 * dims.total * own / disk
    staged = size * min(ranks, cluster.per_node) / ranks
    return Save(size, staged, written, 2 * written + again, config.train.rank_timeout)
