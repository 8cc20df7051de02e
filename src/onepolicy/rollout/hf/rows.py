"""Which request has which slab row, and which rows still hold a prefix worth keeping."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from onepolicy.rollout.driver import Request

MIN_SHARED = 8  # tokens; a shorter common prefix is computed again rather than copied


class Rows:
    """Tokens and fed length of every slab row, free rows included: what they hold can start another request."""

    def __init__(self, slots: int, max_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, max_len, dtype=torch.int64, device=device)
        self.length = np.zeros(slots, dtype=np.int64)  # positions whose keys are in the slab
        self.active: dict[int, Request] = {}
        self._idle = dict.fromkeys(range(slots))  # rows without a request, the longest idle first

    @property
    def free(self) -> int:
        return len(self._idle)

    def best_prefix(self, prompt: Tensor) -> tuple[int, int]:
        """(row, tokens shared) of the row that shares most with `prompt` [P], leaving at least one token to feed."""
        size = len(prompt)
        same = (self.tokens[:, :size] == prompt).to(torch.int32).cumprod(1).sum(1).cpu().numpy()
        shared = np.minimum(np.minimum(same, self.length), size - 1)
        row = int(shared.argmax())
        return row, int(shared[row])

    def take(self, request: Request, row: int | None = None) -> int:
        """Give the request this free row, or the one idle for longest."""
        if row is None:
            row = next(iter(self._idle))
        del self._idle[row]
        self.active[row] = request
        return row

    def release(self, row: int) -> None:
        """The row's content stays until another request takes it."""
        del self.active[row]
        self._idle[row] = None

    def forget(self) -> None:
        self.active.clear()
        self.length[:] = 0
        self._idle = dict.fromkeys(range(len(self.length)))

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
        self.length[there] = self.length[here]
        now_idle = dict(zip(holes, movers, strict=True))
        self._idle = {now_idle.get(row, row): None for row in self._idle}
        for mover, hole in zip(movers, holes, strict=True):
            self.active[hole] = self.active.pop(mover)
