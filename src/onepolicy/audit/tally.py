"""One pass over a dump: sketches overall and per step, histogram, routes, and a bounded sample of rows to diagnose."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from onepolicy.audit.read import read_dump
from onepolicy.audit.schema import Array, Block
from onepolicy.audit.sketch import Sketch
from onepolicy.config import UsageError
from onepolicy.correct.histogram import BINS, histogram
from onepolicy.divergence.attribution import k3_terms
from onepolicy.divergence.routing import differing_experts
from onepolicy.report.words import number
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST

OLDEST = 64  # and beyond


@dataclass(slots=True)
class Ages:
    found: dict[int, tuple[int, float]] = field(
        default_factory=dict
    )  # age: tokens, sum of k3 [nats]

    def add(self, age: Array, trainer: Array, rollout: Array) -> None:
        """age [n] int64, in updates; log-probabilities [n] float64."""
        terms = k3_terms(torch.from_numpy(trainer), torch.from_numpy(rollout)).numpy()
        age = age.clip(0, OLDEST)
        for each in np.unique(age).tolist():
            tokens, total = self.found.get(each, (0, 0.0))
            self.found[each] = (
                tokens + int((age == each).sum()),
                total + float(terms[age == each].sum()),
            )

    @property
    def k3(self) -> dict[int, float]:
        """By age."""
        return {age: total / tokens for age, (tokens, total) in sorted(self.found.items())}

    @property
    def old(self) -> bool:
        """Any token is."""
        return max(self.found, default=0) > 0

    @property
    def explain(self) -> bool:
        """Most of the gap: the newest tokens, if there are enough, have less than EXPLAINED of the k3 of all."""
        if not self.old:
            return False
        tokens, total = (sum(values) for values in zip(*self.found.values(), strict=True))
        return self.found.get(0, (0, 0.0))[0] < FEWEST or self.k3[0] < EXPLAINED * total / tokens

    def text(self) -> str:
        tokens = sum(count for count, _ in self.found.values())
        of_age = (
            f"{number(k3)} at {age} ({self.found[age][0] / tokens:.0%} of the tokens)"
            for age, k3 in self.k3.items()
        )
        return f"k3 by age, in updates: {', '.join(of_age)}."


SAMPLE_TOKENS = 2**18
"""Tokens kept for the diagnosis."""
SAMPLE_ROUTES = 2**22
"""Expert ids of one side kept for the same."""
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
    "tokens",
    "tokens_rollout",
    "turn",
)


class Row(NamedTuple):
    """Ordered so that a heap gives up the row of the highest priority first."""

    order: float  # -priority
    place: int  # in the dump
    step: int
    columns: dict[str, Array]


@dataclass(slots=True, eq=False)
class RowSample:
    """Whole rows drawn uniformly, at most `most` entries of their first column (but one row at least)."""

    names: tuple[str, ...]
    most: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    heap: list[Row] = field(default_factory=list)
    size: int = 0  # entries of the first column
    limit: float = 2.0  # priorities from here on are refused

    def add(self, block: Block, steps: Array) -> None:
        priorities = self.rng.random(len(block.lengths))
        ends = block.lengths.cumsum()
        for row in np.flatnonzero(priorities < self.limit):
            if priorities[row] >= self.limit or not block.lengths[row]:
                continue
            span = slice(int(ends[row] - block.lengths[row]), int(ends[row]))
            kept = {
                name: block.columns[name][span].copy()
                for name in self.names
                if name in block.columns
            }
            heapq.heappush(
                self.heap,
                Row(-float(priorities[row]), block.first_row + int(row), int(steps[row]), kept),
            )
            self.size += kept[self.names[0]].size
            while self.size > self.most and len(self.heap) > 1:
                evicted = heapq.heappop(self.heap)
                self.limit = -evicted.order
                self.size -= evicted.columns[self.names[0]].size

    def rows(self, first_step: int | None) -> list[Row]:
        """In the order of the dump; from this step on if given."""
        kept = (row for row in self.heap if first_step is None or row.step >= first_step)
        return sorted(kept, key=lambda row: row.place)


@dataclass(slots=True, eq=False)
class Routes:
    """Counts of routers that chose other experts, over tokens inside the mask that both sides recorded."""

    slots: int
    tokens: int  # with at least one differing router
    per_layer: Array  # [L] int64

    @property
    def routers(self) -> float:
        return (
            float(self.per_layer.sum()) / (self.slots * len(self.per_layer))
            if self.slots
            else float("nan")
        )


@dataclass(slots=True, eq=False)
class Tally:
    """Everything an audit knows of a dump."""

    path: Path
    columns: tuple[str, ...]
    rows: int = 0
    entries: int = 0  # tokens, prompts included
    total: Sketch | None = None
    native: Sketch | None = None  # of the trainer's score without replay
    histogram: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    steps: dict[int, Sketch] = field(default_factory=dict)  # empty without a step column
    rewards: dict[int, tuple[float, int]] = field(default_factory=dict)  # step: sum, rows
    newest: dict[int, int] = field(default_factory=dict)  # step: newest weight version
    ages: Ages = field(default_factory=Ages)  # empty where the dump does not declare them
    lengths: list[int] = field(
        default_factory=lambda: [0, 0]
    )  # masked-in tokens, rows that have some
    sample: RowSample = field(default_factory=lambda: RowSample(DIAGNOSED, SAMPLE_TOKENS))
    routes_sample: RowSample = field(
        default_factory=lambda: RowSample(("routes_rollout", "routes_trainer"), SAMPLE_ROUTES)
    )
    routes: Routes | None = None

    def add(self, block: Block) -> None:
        columns, segment = block.columns, block.segment
        rows = len(block.lengths)
        steps = columns.get("step", np.zeros(rows, np.int64))
        mask = columns["mask"]
        self.rows, self.entries = self.rows + rows, self.entries + len(mask)
        self._rewards(steps, columns.get("reward"))
        if "version" in columns:
            for step in np.unique(steps):
                if (chosen := mask & (steps[segment] == step)).any():
                    newest = int(columns["version"][chosen].max())
                    self.newest[int(step)] = max(newest, self.newest.get(int(step), newest))
        if not mask.any():
            return
        trainer, rollout = (
            torch.from_numpy(columns[name][mask]) for name in ("logp_trainer", "logp_rollout")
        )
        row = segment[mask]
        if "version" in columns and "trained_version" in columns:
            age = columns["trained_version"][mask] - columns["version"][mask]
            self.ages.add(age, columns["logp_trainer"][mask], columns["logp_rollout"][mask])
        self.histogram += histogram(trainer - rollout)
        if "logp_native" in columns:
            native = Sketch.of(
                torch.from_numpy(columns["logp_native"][mask]), rollout, torch.from_numpy(row)
            )
            self.native = native if self.native is None else self.native.merge(native)
        self._sketches(trainer, rollout, row, steps if "step" in columns else None)
        self.lengths[0] += len(row)
        self.lengths[1] += len(np.unique(row))
        self.sample.add(block, steps)
        if "routes_rollout" in columns:
            self._routes(columns["routes_rollout"][mask], columns["routes_trainer"][mask])
            self.routes_sample.add(block, steps)

    def _sketches(self, trainer: Tensor, rollout: Tensor, row: Array, steps: Array | None) -> None:
        segment = torch.from_numpy(row)
        if steps is None or (steps == steps[0]).all():
            found = Sketch.of(trainer, rollout, segment)
            self.total = found if self.total is None else self.total.merge(found)
            if steps is not None:
                self._step(int(steps[0]), found)
            return
        of_token = torch.from_numpy(steps[row])
        for step in of_token.unique().tolist():
            chosen = of_token == step
            found = Sketch.of(trainer[chosen], rollout[chosen], segment[chosen])
            self.total = found if self.total is None else self.total.merge(found)
            self._step(step, found)

    def _step(self, step: int, found: Sketch) -> None:
        self.steps[step] = self.steps[step].merge(found) if step in self.steps else found
        if len(self.steps) > MAX_STEPS:
            raise UsageError(
                f"{self.path}: column step: more than {MAX_STEPS} different values; is it another column?"
            )

    def _rewards(self, steps: Array, reward: Array | None) -> None:
        if reward is None:
            return
        for step in np.unique(steps):
            total, count = self.rewards.get(int(step), (0.0, 0))
            chosen = reward[steps == step]
            self.rewards[int(step)] = (total + float(chosen.sum()), count + len(chosen))

    def _routes(self, rollout: Array, trainer: Array) -> None:
        layers = rollout.shape[1]
        known = ~((rollout < 0) | (trainer < 0)).any((1, 2))
        differ = [
            differing_experts(
                torch.from_numpy(rollout[known, i]), torch.from_numpy(trainer[known, i])
            ).numpy()
            > 0
            for i in range(layers)
        ]
        differs = np.stack(differ, axis=1) if layers else np.zeros((0, 0), bool)
        if self.routes is None:
            self.routes = Routes(0, 0, np.zeros(layers, np.int64))
        if len(self.routes.per_layer) != layers:
            raise UsageError(
                f"{self.path}: column route_layers: changes inside the dump; one model only"
            )
        self.routes.slots += int(known.sum())
        self.routes.tokens += int(differs.any(1).sum())
        self.routes.per_layer += differs.sum(0)

    @property
    def mean_length(self) -> int:
        """Trainable tokens of a sequence."""
        return max(1, round(self.lengths[0] / max(1, self.lengths[1])))


def tally(
    path: Path, mapping: Mapping[str, str], progress: Callable[[float], None] = lambda done: None
) -> Tally:
    """Read a whole dump. UsageError: anything wrong with it, or not one token inside the mask."""
    blocks: Iterable[Block] = read_dump(path, mapping)
    result: Tally | None = None
    for block in blocks:
        if result is None:
            result = Tally(path, tuple(block.columns))
        result.add(block)
        progress(block.done)
    assert result is not None, "read_dump refuses an empty dump"
    if result.total is None:
        raise UsageError(
            f"{path}: column mask: selects none of {result.entries} tokens; there is nothing to compare"
        )
    return result
