"""Checks of a dump's supports, on every token: the sets that tokens were drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from onepolicy.notation import number
from onepolicy.record.schema import Scored
from onepolicy.support.checks import CERTAIN, CLEAR_SHIFT
from onepolicy.support.trace import SupportTrace
from onepolicy.verdict.scored_tokens import Finding

SHIFTS = {"before": 1, "after": -1}
SIDES = {"rollout": "the engine's", "trainer": "the trainer's"}


@dataclass(slots=True, eq=False)
class SupportCounts:
    """Counts over the tokens inside the mask."""

    tokens: int = 0
    kept: int = 0  # ids of their sets
    missing: int = 0  # tokens whose set was not captured
    outside: int = 0  # tokens that are not in their own set
    twice: int = 0  # tokens whose set has an id more than once
    neighbours: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHIFTS, 0))
    in_neighbours: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHIFTS, 0))
    # tokens that are alone in their set, by the side whose log-probability is below 0 all the same
    uncertain: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SIDES, 0))
    first: str = ""  # place of the first token without a set, or outside its own

    def add(self, block: Scored) -> None:
        """Add the rows of a block."""
        columns = {name: torch.from_numpy(values) for name, values in block.columns.items()}
        counts, mask, tokens = columns["support_counts"], columns["mask"], columns["tokens"]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        support = SupportTrace(columns["support_ids"], offsets)
        known = mask & support.captured
        own = support.contains(tokens)
        wrong = mask & ~own  # sets that were not captured, too
        self.tokens += int(mask.sum())
        self.kept += int(counts[mask].sum())
        self.missing += int((mask & ~support.captured).sum())
        self.outside += int((known & ~own).sum())
        self.twice += _with_repeats(support.at(mask.nonzero()[:, 0]))
        if wrong.any() and not self.first:
            place = int(wrong.nonzero()[0, 0])
            ends = block.lengths.cumsum()
            row = int((ends <= place).sum())
            entry = place - int(ends[row] - block.lengths[row])
            self.first = f"row {block.first_row + row}, entry {entry}"
        segment = torch.from_numpy(block.segment)
        for where, by in SHIFTS.items():
            has = known & _has_neighbour(known, segment, by)
            self.neighbours[where] += int(has.sum())
            self.in_neighbours[where] += int((has & support.contains(tokens.roll(by))).sum())
        alone = known & (counts == 1)
        for side in SIDES:
            self.uncertain[side] += int((alone & (columns[f"logp_{side}"] < CERTAIN)).sum())

    @property
    def fault(self) -> str:
        """The reason why these are not the sets of these tokens; empty if they may be."""
        parts = []
        if self.outside:
            parts.append(
                f"{self.outside:,} of {self.tokens:,} tokens are not in their own support"
                f"{self._whose()}"
            )
        if self.twice:
            parts.append(
                f"{self.twice:,} tokens have a token id more than once in their support: these are "
                "no sets"
            )
        if self.missing:
            parts.append(
                f"{self.missing:,} of {self.tokens:,} tokens have no support (support_counts 0), "
                "so their ratio says nothing about the policy"
            )
        if not parts:
            return ""
        text = "; ".join(parts)
        if self.first:
            text += f". The first is {self.first}"
        return text

    def _whose(self) -> str:
        for where in SHIFTS:
            share = self.in_neighbours[where] / max(1, self.neighbours[where])
            if share >= CLEAR_SHIFT:
                named = number(share, share=True)
                return f", but {named} of the tokens {where} them are: the sets are a token apart"
        return ": the sets are of other requests, or were cut"

    @property
    def raw(self) -> Finding | None:
        """Values that are not over the sets: a token that is alone in its own set is certain."""
        sides = [SIDES[side] for side, count in self.uncertain.items() if count]
        if not sides or self.fault:
            return None
        return Finding(
            "support",
            f"{max(self.uncertain.values()):,} tokens are alone in their support, but have a "
            f"log-probability below 0: {' and '.join(sides)} values are over the whole vocabulary, "
            "or over larger sets",
        )

    def describe(self) -> str:
        """Return what the sets are as a sentence."""
        size = number(self.kept / max(1, self.tokens - self.missing))
        return f"Tokens were drawn from {size} tokens on average (supports)."


def _with_repeats(support: SupportTrace) -> int:
    """Return how many sets have an id more than once. Sets that ascend need no sorting."""
    ids, slots = support.ids.long(), support.slot_of
    if not ((ids.diff() <= 0) & (slots.diff() == 0)).any():
        return 0
    keys = (slots << 32 | ids).sort().values
    return len((keys[1:][keys.diff() == 0] >> 32).unique())


def _has_neighbour(known: Tensor, segment: Tensor, by: int) -> Tensor:
    """Return [T] bool: whether the token `by` places before is one of the same row, and known."""
    near = known.roll(by) & (segment == segment.roll(by))
    if len(near):
        near[min(by, 0)] = False  # roll() takes this one's neighbour from the other end
    return near
