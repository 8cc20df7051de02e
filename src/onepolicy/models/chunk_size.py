"""The number of slots whose logits are computed at a time, by models/logits_chunks.py."""

from __future__ import annotations

MARK = "_onepolicy_logits_chunk"  # attribute of a model whose logits are computed in chunks
LARGEST_CHUNK = 2**28  # float32 logits of a chunk: 1 GiB
MULTIPLE = 64  # of the slots of a chunk that is chosen here


def slots_per_chunk(setting: int | None, vocabulary: int) -> int:
    """Return the slots of a chunk, 0 for no chunks. setting: train.logits_chunk."""
    if setting is None:
        return max(MULTIPLE, LARGEST_CHUNK // vocabulary // MULTIPLE * MULTIPLE)
    return setting
