"""One pass over a dump: statistics overall and per step, and a bounded sample of rows."""

from __future__ import annotations

import functools
import heapq
import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepolicy.audit.supports import SupportCounts
from onepolicy.config import UsageError
from onepolicy.correct.report import BINS, histogram
from onepolicy.divergence.routing import differing_experts
from onepolicy.nonfinite import LeftOut, Nonfinite
from onepolicy.notation import number
from onepolicy.record.means import NO_TOKEN, Mean, means_by
from onepolicy.record.read import BY_SIZE, ReadLimits, read_dump
from onepolicy.record.schema import Array, Scored
from onepolicy.record.statistics import RowSums, Statistics, k3_terms, row_starts
from onepolicy.verdict.rules import FEW_ROWS, RECENT, ByRoutes
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST

SIDES = ("trainer", "rollout")
MAX_AGE = 64  # older tokens count as this old
SAMPLE_TOKENS = 2**18
"""Tokens in the sample of rows for the diagnosis, prompts not counted."""
KEPT_BEFORE = 2
"""Tokens of a prompt or tool output that the sample keeps: a shift by two does not cross them."""
SAMPLE_ROUTES = 2**22
"""Expert ids of one side in the sample of rows with routes."""
MAX_STEPS = 100_000
DIAGNOSED = (
    "mask",
    "logp_rollout",
    "logp_trainer",
    "logp_native",
    "version",
    "trained_version",
    "entropy",
    "logp_previous",
    "logp_base",
    "tokens",
    "tokens_rollout",
    "turn",
    "logp_vocabulary",
)


@dataclass(slots=True)
class AgeStats:
    """The gap by the age of tokens, in updates."""

    by_age: dict[int, Mean] = field(default_factory=dict)  # of k3 [nats]

    def add(self, age: Array, log_rho: Array, row: Array) -> None:
        """Add tokens. age: [n] int64, in updates. log_rho: [n] float64. row: [n] int64, ascending.

        A token older than MAX_AGE counts as that old.
        """
        _add_means(self.by_age, means_by(age.clip(0, MAX_AGE), k3_terms(log_rho), row))

    @property
    def has_old_tokens(self) -> bool:
        return max(self.by_age, default=0) > 0

    @property
    def explains_gap(self) -> bool:
        """True if most of the gap is due to old tokens.

        That is so if the newest tokens are too few, or have less than EXPLAINED of the k3 of all.
        """
        if not self.has_old_tokens:
            return False
        newest = self.by_age.get(0, NO_TOKEN)
        if newest.tokens < FEWEST:
            return True
        return newest.mean < EXPLAINED * self._all.mean

    @property
    def _all(self) -> Mean:
        return functools.reduce(operator.add, self.by_age.values())

    def describe(self) -> str:
        """Return k3 by age as a sentence."""
        tokens = self._all.tokens
        parts = [
            f"{number(k3.mean)} at {age} ({k3.tokens / tokens:.0%} of the tokens)"
            for age, k3 in sorted(self.by_age.items())
        ]
        return f"k3 by age, in updates: {', '.join(parts)}."


class SampledRow(NamedTuple):
    """A row in the sample. A heap of them yields the row with the highest priority first."""

    negative_priority: float
    dump_row: int  # index in the dump
    step: int
    columns: dict[str, Array]


@dataclass(slots=True, eq=False)
class RowSample:
    """A uniform sample of whole rows.

    It has at most `max_entries` entries of its first column, but at least `fewest` rows.
    """

    names: tuple[str, ...]
    max_entries: int
    fewest: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    heap: list[SampledRow] = field(default_factory=list)
    size: int = 0  # entries of the first column
    limit: float = 2.0  # rows with this priority or a higher one are not sampled

    def add(self, block: Scored, steps: Array) -> None:
        """Add the rows of a block. steps: [S], the step of each row."""
        priorities = self.rng.random(len(block.lengths))
        ends = block.lengths.cumsum()
        for row in np.flatnonzero(priorities < self.limit):
            if priorities[row] >= self.limit:
                continue
            span = slice(int(ends[row] - block.lengths[row]), int(ends[row]))
            columns = {
                name: block.columns[name][span].copy()
                for name in self.names
                if name in block.columns
            }
            if "mask" in columns:
                columns = _without_prompts(columns)
            else:
                for routes in columns.values():  # outside the mask they may be anything
                    routes[~block.columns["mask"][span]] = -1
            if not columns[self.names[0]].size:
                continue
            dump_row, priority = block.first_row + int(row), float(priorities[row])
            heapq.heappush(self.heap, SampledRow(-priority, dump_row, int(steps[row]), columns))
            self.size += columns[self.names[0]].size
            self._evict()

    def _evict(self) -> None:
        while self.size > self.max_entries and len(self.heap) > self.fewest:
            evicted = heapq.heappop(self.heap)
            self.limit = -evicted.negative_priority
            self.size -= evicted.columns[self.names[0]].size

    def rows(self, first_step: int | None) -> list[SampledRow]:
        """Return the rows from `first_step` on (None: all), in the order of the dump."""
        rows = [row for row in self.heap if first_step is None or row.step >= first_step]
        return sorted(rows, key=lambda row: row.dump_row)


def _without_prompts(columns: dict[str, Array]) -> dict[str, Array]:
    """Return the entries of a row inside the mask, and KEPT_BEFORE before each run of them.

    Where entries are left out, the next token becomes a number of all tokens up to it: answers to
    other prompts stay other contexts.
    """
    mask, tokens = columns["mask"], columns["tokens"].copy()
    kept = mask.copy()
    for by in range(1, KEPT_BEFORE + 1):
        kept[:-by] |= mask[by:]
    for at in np.flatnonzero(kept[1:] & ~kept[:-1]) + 1:
        tokens[at] = zlib.crc32(columns["tokens"][: at + 1].tobytes())
    return {name: values[kept] for name, values in (columns | {"tokens": tokens}).items()}


@dataclass(slots=True, eq=False)
class RoutingCounts:
    """Counts of differing routes, over slots inside the mask that both sides recorded."""

    slots: int
    tokens: int  # with at least one differing router
    per_layer: Array  # [L] int64, slots with a differing router
    top_k: int
    k3: ByRoutes = field(default_factory=ByRoutes)

    @property
    def routers(self) -> float:
        """Share of routes that differ; NaN without slots."""
        if not self.slots:
            return float("nan")
        return float(self.per_layer.sum()) / (self.slots * len(self.per_layer))


@dataclass(slots=True, eq=False)
class DumpAccumulator:
    """Statistics of a dump, accumulated block by block."""

    path: Path
    columns: tuple[str, ...]
    framework: str = ""  # the trainer that the first file names; empty for none
    named: bool = False  # steps are those in the names of the files
    replayed: bool = False  # the first file says that the trainer replays
    rows: int = 0
    entries: int = 0  # tokens, prompts included
    overall: Statistics | None = None
    native: Statistics | None = None  # of the trainer's score without replay
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    steps: dict[int, Statistics] = field(default_factory=dict)  # empty without a step column
    rewards: dict[int, Mean] = field(default_factory=dict)  # of rows, by step
    newest: dict[int, int] = field(default_factory=dict)  # step: newest weight version
    ages: AgeStats = field(default_factory=AgeStats)  # empty if the dump has no ages
    nonfinite: LeftOut = field(default_factory=LeftOut)  # tokens that are left out
    sample: RowSample = field(default_factory=lambda: RowSample(DIAGNOSED, SAMPLE_TOKENS, FEW_ROWS))
    routes_sample: RowSample = field(
        default_factory=lambda: RowSample(("routes_rollout", "routes_trainer"), SAMPLE_ROUTES)
    )
    routes: RoutingCounts | None = None
    supports: SupportCounts | None = None  # None: the dump has none

    def add(self, block: Scored) -> None:
        """Add the rows of a block."""
        columns, mask = block.columns, block.columns["mask"]
        rows = len(block.lengths)
        steps = columns.get("step", np.zeros(rows, np.int64))
        self.rows, self.entries = self.rows + rows, self.entries + len(mask)
        self.nonfinite += block.left_out
        self._add_rewards(steps, columns.get("reward"))
        self._add_newest_versions(block, steps)
        if not mask.any():
            return
        self._add_logps(block, steps)
        self.sample.add(block, steps)
        if "routes_rollout" in columns:
            self._add_routes(block)
            self.routes_sample.add(block, steps)
        if "support_ids" in columns:
            self.supports = self.supports or SupportCounts()
            self.supports.add(block)

    def _add_rewards(self, steps: Array, reward: Array | None) -> None:
        if reward is None:
            return
        _add_means(self.rewards, means_by(steps, reward, np.arange(len(steps))))
        self._check_steps(len(self.rewards))

    def _add_newest_versions(self, block: Scored, steps: Array) -> None:
        if "version" not in block.columns:
            return
        mask = block.columns["mask"]
        version = block.columns["version"][mask]
        values, at = np.unique(steps[block.segment[mask]], return_inverse=True)
        newest = np.full(len(values), np.iinfo(np.int64).min)
        np.maximum.at(newest, at, version)
        for step, found in zip(values.tolist(), newest.tolist(), strict=True):
            self.newest[step] = max(found, self.newest.get(step, found))

    def _add_ages(
        self, columns: Mapping[str, Array], mask: Array, log_rho: Array, row: Array
    ) -> None:
        if "version" in columns and "trained_version" in columns:
            age = columns["trained_version"][mask] - columns["version"][mask]
            self.ages.add(age, log_rho, row)

    def _add_logps(self, block: Scored, steps: Array) -> None:
        columns, mask = block.columns, block.columns["mask"]
        trainer, rollout = columns["logp_trainer"][mask], columns["logp_rollout"][mask]
        row = block.segment[mask]
        self._add_ages(columns, mask, trainer - rollout, row)
        self.histogram += histogram(torch.from_numpy(trainer - rollout))
        if "logp_native" in columns:
            native = Statistics.of(columns["logp_native"][mask], rollout, row)
            self.native = _merged(self.native, native)
        sums = RowSums.of(trainer, rollout, row)
        found = Statistics.of_rows(sums)
        self.overall = _merged(self.overall, found)
        if "step" not in columns:
            return
        steps = steps[row[row_starts(row)]]
        values = np.unique(steps).tolist()
        for step in values:
            if len(values) > 1:
                found = Statistics.of_rows(sums.at(steps == step))
            self.steps[step] = _merged(self.steps.get(step), found)
        self._check_steps(len(self.steps))

    def _check_steps(self, count: int) -> None:
        if count > MAX_STEPS:
            raise UsageError(
                f"{self.path}: column step: more than {MAX_STEPS} different values; "
                "is it another column?"
            )

    def _add_routes(self, block: Scored) -> None:
        columns, mask = block.columns, block.columns["mask"]
        rollout, trainer = (columns[f"routes_{side}"][mask] for side in ("rollout", "trainer"))
        layers, top_k = rollout.shape[1:]  # of [n, L, K]
        recorded = ~((rollout < 0) | (trainer < 0)).any((1, 2))
        differs = np.zeros((int(recorded.sum()), layers), bool)
        for i in range(layers):
            chosen_rollout = torch.from_numpy(rollout[recorded, i])
            chosen_trainer = torch.from_numpy(trainer[recorded, i])
            differs[:, i] = differing_experts(chosen_rollout, chosen_trainer).numpy() > 0
        if self.routes is None:
            self.routes = RoutingCounts(0, 0, np.zeros(layers, np.int64), top_k)
        first = {"route_layers": len(self.routes.per_layer), "route_top_k": self.routes.top_k}
        for name, size in {"route_layers": layers, "route_top_k": top_k}.items():
            if first[name] != size:
                raise UsageError(
                    f"{self.path}: column {name}: changes from {first[name]} to {size} inside the "
                    "dump; one model only"
                )
        self.routes.slots += int(recorded.sum())
        self.routes.tokens += int(differs.any(1).sum())
        self.routes.per_layer += differs.sum(0)
        trainer, rollout = (columns[f"logp_{side}"][mask][recorded] for side in SIDES)
        terms = k3_terms(trainer - rollout)
        here: Array = np.asarray(differs.any(1))
        row = block.segment[mask][recorded]
        lately = here.copy()
        for by in range(1, min(RECENT + 1, len(here))):
            lately[by:] |= here[:-by] & (row[by:] == row[:-by])
        known, agree = self.routes.k3, ~lately
        self.routes.k3 = ByRoutes(
            known.differing + Mean.of(terms[here], row[here]),
            known.agreeing + Mean.of(terms[agree], row[agree]),
        )


def _merged(total: Statistics | None, part: Statistics) -> Statistics:
    if total is None:
        return part
    return total + part


def _add_means(total: dict[int, Mean], parts: Mapping[int, Mean]) -> None:
    for label, part in parts.items():
        total[label] = total.get(label, NO_TOKEN) + part


def accumulate_dump(
    path: Path,
    mapping: Mapping[str, str],
    progress: Callable[[float], None] = lambda done: None,
    *,
    nonfinite: Nonfinite = "skip",
    limits: ReadLimits = BY_SIZE,
) -> DumpAccumulator:
    """Read a whole dump.

    progress: called with the share that has been read. Raises UsageError for anything wrong with
    the dump, if a value is not finite and `nonfinite` is "raise", and if no token is left inside
    the mask.
    """
    accumulator: DumpAccumulator | None = None
    for block in read_dump(path, mapping, limits):
        if nonfinite == "raise" and block.left_out.count:
            raise UsageError(
                f"{block.first_left_out}: not a finite number inside the mask; clear the mask "
                "there, or leave such tokens out with --nonfinite skip"
            )
        if accumulator is None:
            columns = tuple(block.columns)
            said = block.framework, block.named, block.replayed
            accumulator = DumpAccumulator(path, columns, *said)
        accumulator.add(block)
        progress(block.done)
    assert accumulator is not None, "read_dump refuses an empty dump"
    if accumulator.overall is None and accumulator.nonfinite.count:
        raise UsageError(f"{path}: {accumulator.nonfinite}; there is nothing to compare")
    if accumulator.overall is None:
        raise UsageError(
            f"{path}: column mask: selects none of {accumulator.entries} tokens; "
            "there is nothing to compare"
        )
    return accumulator
