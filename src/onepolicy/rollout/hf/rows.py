"""Which request has which slab row, and which rows still hold a prefix worth keeping."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onepolicy.rollout.hf.request import Request

MIN_SHARED = 8  # tokens; a shorter common prefix is computed again rather than copied


class Rows:
    """Tokens and fed length of every slab row, free rows included: what they hold can start another request."""

    def __init__(self, slots: int, max_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, max_len, dtype=torch.int64, device=device)
        self.length = np.zeros(slots, dtype=np.int64)  # positions whose keys are in the slab
        self.active: dict[int, Request] = {}
        self._freed = np.zeros(slots, dtype=np.int64)  # when: the longest free is taken first
        self._clock = 0

    @property
    def free(self) -> int:
        return len(self.length) - len(self.active)

    def best_prefix(self, prompt: Tensor) -> tuple[int, int]:
        """(row, tokens shared) of the row that shares most with `prompt` [P], leaving at least one token to feed."""
        size = len(prompt)
        same = (self.tokens[:, :size] == prompt).to(torch.int32).cumprod(1).sum(1).cpu().numpy()
        shared = np.minimum(np.minimum(same, self.length), size - 1)
        row = int(shared.argmax())
        return row, int(shared[row])

    def take(self, request: Request, row: int | None = None) -> int:
        """Give the request this free row, or the one that was freed longest ago."""
        if row is None:
            row = min((r for r in range(len(self.length)) if r not in self.active), key=lambda r: (self._freed[r], r))
        assert row not in self.active
        self.active[row] = request
        return row

    def release(self, row: int) -> None:
        """The row's content stays until another request takes it."""
        self._clock += 1
        self._freed[row] = self._clock
        del self.active[row]

    def forget(self) -> None:
        self.active.clear()
        self.length[:] = 0
        self._freed[:] = 0

    def compaction(self) -> tuple[list[int], list[int]]:
        """(from, to): pairs of rows to swap so that running rows come first; nothing if they are dense already."""
        count = len(self.active)
        if not count or 4 * count >= 3 * (max(self.active) + 1):
            return [], []
        movers = sorted(row for row in self.active if row >= count)
        holes = [row for row in range(count) if row not in self.active]
        return movers, holes

    def swap(self, movers: list[int], holes: list[int]) -> None:
        """Bookkeeping of a compaction."""
        here, there = [*movers, *holes], [*holes, *movers]
        self.tokens[there] = self.tokens[here]
        self.length[there], self._freed[there] = self.length[here], self._freed[here]
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active.pop(mover)
