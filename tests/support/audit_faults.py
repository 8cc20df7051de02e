"""Synthetic worlds in the shape of real dumps, clean and with one planted fault each, for an audit
to distinguish.

A world has rows of 40 to 140 sampled tokens behind a prompt, 72% of them nearly deterministic. Both
engines are a softmax over the same logits but for noise. A fault changes the numbers that one side
computed, or their record.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onepolicy.audit.accumulator import DumpAccumulator
from onepolicy.audit.assessment import AuditResult, assess
from onepolicy.config import UsageError
from onepolicy.record.schema import RaggedColumn
from onepolicy.record.validate import checked_block
from onepolicy.verdict.declared import UNDECLARED, Declared

ROWS, SHORTEST, LONGEST, PROMPT, VOCABULARY = 96, 40, 140, 12, 120
SMALL, MOE = "small", "moe"
GAPS = {SMALL: (0.02, 0.0, 0.0), MOE: (0.05, 0.1, 0.5)}
"""Noise of every logit, share of tokens whose experts differ, noise of their logits."""


@dataclasses.dataclass
class World:
    """n tokens of all rows, prompts included."""

    rng: np.random.Generator
    generator: torch.Generator
    lengths: Tensor  # [R] int64
    segment: Tensor  # [n] int64
    place: Tensor  # [n] int64, within the row
    sampled: Tensor  # [n] bool: behind the prompt
    trainer: Tensor  # [n, V] logits
    engine: Tensor  # [n, V] logits
    tokens: Tensor  # [n] int64
    columns: dict[str, Tensor]  # per token [n], or per row [R]

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def copy(self) -> World:
        """Return a copy with the same future random numbers. The logits are shared: a fault
        replaces them, and writes into none."""
        columns = {name: values.clone() for name, values in self.columns.items()}
        rng, generator = copy.deepcopy(self.rng), torch.Generator()
        generator.set_state(self.generator.get_state())
        return dataclasses.replace(self, rng=rng, generator=generator, columns=columns)

    def noise(self, scale: float, like: Tensor | None = None) -> Tensor:
        shape = self.trainer.shape if like is None else like.shape
        return scale * torch.randn(shape, generator=self.generator)

    def draw(self, logits: Tensor) -> None:
        """Sample anew from these logits and score both sides again. Prompts stay."""
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)[:, 0]
        self.tokens = torch.where(self.sampled, drawn, self.tokens)
        self.score()

    def score(self, *, engine: Tensor | None = None, trainer: Tensor | None = None) -> None:
        engine = self.engine if engine is None else engine
        trainer = self.trainer if trainer is None else trainer
        self.columns |= {
            "tokens": self.tokens,
            "logp_rollout": logp(engine, self.tokens),
            "logp_trainer": logp(trainer, self.tokens),
            "entropy": torch.distributions.Categorical(logits=trainer).entropy().clamp(min=0),
        }

    def pick_rows(self, share: float) -> Tensor:
        """Draw a fraction of the rows and return their tokens as [n] bool."""
        count = max(1, round(share * self.rows))
        chosen = torch.zeros(self.rows, dtype=torch.bool)
        chosen[torch.randperm(self.rows, generator=self.generator)[:count]] = True
        return chosen[self.segment]

    def point_of_each_row(self) -> Tensor:
        """Draw a token of every row's first 70%, [R] int64."""
        share = 0.1 + 0.6 * torch.rand(self.rows, generator=self.generator)
        return (PROMPT + (self.lengths - PROMPT) * share).long()

    def audited(self, declared: Declared = UNDECLARED) -> AuditResult:
        lengths = self.lengths.numpy()
        raw = {}
        for name, values in self.columns.items():
            per_token = len(values) // len(self.segment)  # 0: one value a row; of routes many
            raw[name] = RaggedColumn(values.numpy(), per_token * lengths if per_token else None)
        block = checked_block("dump", 0, raw, 1.0)
        found = DumpAccumulator(Path("dump"), tuple(block.columns))
        found.add(block)
        return assess(found, "dump", declared=declared)


def logp(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def world(
    seed: int, gap: str = SMALL, *, rows: int = ROWS, longest: int = LONGEST, version: bool = True
) -> World:
    g = torch.Generator().manual_seed(seed)
    lengths = PROMPT + torch.randint(SHORTEST, longest + 1, (rows,), generator=g)
    n = int(lengths.sum())
    segment = torch.arange(rows).repeat_interleave(lengths)
    place = torch.arange(n) - (lengths.cumsum(0) - lengths)[segment]
    logits = torch.randn(n, VOCABULARY, generator=g) * (0.7 + 2.5 * torch.rand(n, 1, generator=g))
    sure = torch.rand(n, generator=g) < 0.72
    best = torch.randint(VOCABULARY, (n,), generator=g)
    boost = torch.where(sure, 9 + 12 * torch.rand(n, generator=g), torch.zeros(n))
    logits[torch.arange(n), best] += boost
    every, flipped, far = GAPS[gap]
    scale = torch.where(torch.rand(n, 1, generator=g) < flipped, far, every)
    engine = logits + scale * torch.randn(logits.shape, generator=g)
    sampled = place >= PROMPT
    columns = {"mask": sampled.clone()} | ({"version": torch.full((rows,), 3)} if version else {})
    tokens = torch.randint(VOCABULARY, (n,), generator=g)
    shape = (lengths, segment, place, sampled)
    made = World(np.random.default_rng(seed), g, *shape, logits, engine, tokens, columns)
    made.draw(engine)
    return made


Fault = Callable[[World], None]
Outcome = tuple[str, tuple[str, ...], str]
"""Action of a verdict (or refused), causes, words."""


@dataclasses.dataclass(frozen=True)
class Planted:
    plant: Fault
    causes: tuple[str, ...] = ()  # any of these is the right one; none: no mark names it


def _without(name: str) -> Fault:
    def plant(w: World) -> None:
        w.columns.pop(name)

    return plant


def _both(*faults: Fault) -> Fault:
    def plant(w: World) -> None:
        for fault in faults:
            fault(w)

    return plant


def temperature(t: float, *, reported: bool, share: float = 1.0) -> Fault:
    """Let the engine sample at t. reported: its log-probabilities are at t too."""

    def plant(w: World) -> None:
        hot = torch.where(w.pick_rows(share)[:, None], w.engine / t, w.engine)
        w.draw(hot)
        w.score(engine=hot if reported else None)

    return plant


def trainer_temperature(t: float, share: float = 1.0) -> Fault:
    def plant(w: World) -> None:
        w.score(trainer=torch.where(w.pick_rows(share)[:, None], w.trainer / t, w.trainer))

    return plant


def narrowed(top_k: int = 0, top_p: float = 1.0, *, reported: bool = True) -> Fault:
    def plant(w: World) -> None:
        kept = w.engine
        if top_k:
            kept = kept.masked_fill(kept < kept.topk(top_k).values[:, -1:], -math.inf)
        if top_p < 1:
            p, order = w.engine.softmax(-1).sort(descending=True)
            out = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= top_p)
            kept = kept.masked_fill(out, -math.inf)
        w.draw(kept)
        w.score(engine=kept if reported else None)

    return plant


def scaled(side: str, factor: float) -> Fault:
    def plant(w: World) -> None:
        w.columns[side] = w.columns[side] * factor

    return plant


def per_character(side: str) -> Fault:
    """Divide by the number of characters of each token."""

    def plant(w: World) -> None:
        characters = 1 + torch.randint(0, 8, (VOCABULARY,), generator=w.generator)
        w.columns[side] = w.columns[side] / characters[w.tokens]

    return plant


def shifted(
    by: int, *, side: str = "logp_rollout", share: float = 1.0, turn: bool = False, since: int = 0
) -> Fault:
    """Shift values by one slot. turn: only behind a tool's answer in the middle of the row; since:
    from this token on."""

    def plant(w: World) -> None:
        moved = w.columns[side].roll(by)
        where = w.pick_rows(share)
        if turn:
            middle = (w.lengths // 2)[w.segment]
            w.columns["mask"] = w.columns["mask"] & ~((w.place >= middle) & (w.place < middle + 6))
            where = where & (w.place >= middle)
        where = where & (w.place >= PROMPT + since)
        edge = (w.place == PROMPT) | (w.place == (w.lengths - 1)[w.segment])
        w.columns[side] = torch.where(where & ~edge, moved, w.columns[side])

    return plant


def merged(share: float, *, lost: int = 1) -> Fault:
    """Merge one token of a row on one side: everything behind it is `lost` slots early."""

    def plant(w: World) -> None:
        at = w.point_of_each_row()
        behind = (w.place >= at[w.segment]) & (w.place < (w.lengths - lost)[w.segment])
        scored = w.columns["logp_trainer"]
        moved = torch.where(w.pick_rows(share) & behind, scored.roll(-lost), scored)
        w.columns["logp_trainer"] = moved

    return plant


def other_tokens(share: float) -> Fault:
    """Let the trainer score other text from a point of the row on."""

    def plant(w: World) -> None:
        at = w.point_of_each_row()
        where = w.pick_rows(share) & (w.place >= at[w.segment])
        others = torch.randint(VOCABULARY, w.tokens.shape, generator=w.generator)
        scored = logp(w.trainer, torch.where(where, others, w.tokens))
        w.columns["logp_trainer"] = scored

    return plant


def ending(value: float, *, side: str = "logp_rollout", last: int = 1) -> Fault:
    """Fill in a value for the end token, which is not a certain one."""

    def plant(w: World) -> None:
        at = w.place >= (w.lengths - last)[w.segment]
        true = -0.2 - torch.rand(len(w.place), generator=w.generator)
        for name in ("logp_rollout", "logp_trainer"):
            w.columns[name] = torch.where(at, true, w.columns[name])
        w.columns["entropy"] = torch.where(at, 0.7, w.columns["entropy"])
        w.columns[side] = torch.where(at, value, w.columns[side])

    return plant


def filled(value: float, share: float, *, side: str = "logp_rollout") -> Fault:
    def plant(w: World) -> None:
        at = torch.rand(w.place.shape, generator=w.generator) < share
        w.columns[side] = torch.where(at, value, w.columns[side])

    return plant


def stale(
    share: float, far: float = 0.45, *, declared: bool = False, version: bool = True, since: int = 0
) -> Fault:
    """Sample rows by other weights. since: only from this token on (the weights changed in
    mid-row)."""

    def plant(w: World) -> None:
        rows = w.pick_rows(share)
        moved = w.engine + w.noise(far)
        engine = torch.where((rows & (w.place >= PROMPT + since))[:, None], moved, w.engine)
        w.draw(engine)
        w.score(engine=engine)
        if not version:
            w.columns.pop("version", None)
        elif declared:
            old = torch.zeros(w.rows, dtype=torch.bool)
            old[w.segment[rows].unique()] = True
            w.columns["version"] = torch.where(old, 2, 3)

    return plant


def uneven(spread: float = 0.5) -> Fault:
    """Let rows differ in noise, which is no fault: some have more tokens whose experts differ."""

    def plant(w: World) -> None:
        size = (spread * torch.randn(w.rows, 1, generator=w.generator)).exp()
        w.engine = w.trainer + size[w.segment] * (w.engine - w.trainer)
        w.draw(w.engine)

    return plant


def blind(count: int) -> Fault:
    """Let the engine mask a part of the prompt in some rows, which affects their first tokens
    most."""

    def plant(w: World) -> None:
        rows = w.pick_rows(count / w.rows)
        near = (1 - (w.place - PROMPT) / 20).clamp(0.5, 1)[:, None]
        engine = torch.where(rows[:, None], w.engine + w.noise(2.5) * near, w.engine)
        w.draw(engine)
        w.score(engine=engine)

    return plant


def swapped(share: float, side: str = "logp_rollout") -> Fault:
    """Give rows the values of another row."""

    def plant(w: World) -> None:
        count = max(2, round(share * w.rows))
        rows = torch.randperm(w.rows, generator=w.generator)[:count].tolist()
        starts = (w.lengths.cumsum(0) - w.lengths).tolist()
        before = w.columns[side].clone()
        for a, b in zip(rows, rows[1:] + rows[:1], strict=True):
            n = int(min(w.lengths[a], w.lengths[b]))
            others = before[starts[b] + PROMPT : starts[b] + n]
            w.columns[side][starts[a] + PROMPT : starts[a] + n] = others

    return plant


def copied(share: float) -> Fault:
    def plant(w: World) -> None:
        rows = w.pick_rows(share)
        w.columns["logp_rollout"] = torch.where(
            rows, w.columns["logp_trainer"], w.columns["logp_rollout"]
        )

    return plant


def prompts_in_mask(value: float | None, *, both: bool = False) -> Fault:
    """Put prompts into the mask. None: with their log-probabilities on both sides."""

    def plant(w: World) -> None:
        w.columns["mask"] = torch.ones_like(w.columns["mask"])
        if value is not None:
            for side in ("logp_rollout", "logp_trainer") if both else ("logp_rollout",):
                w.columns[side] = torch.where(w.sampled, w.columns[side], value)

    return plant


def padding_in_mask(value: float) -> Fault:
    """Put padding into the mask: the last quarter of each row is padding on both sides."""

    def plant(w: World) -> None:
        at = w.place >= (w.lengths * 3 // 4)[w.segment]
        for side in ("logp_rollout", "logp_trainer"):
            w.columns[side] = torch.where(at, value, w.columns[side])

    return plant


def other_context(first: int, far: float) -> Fault:
    """Let the trainer score behind another system prompt, which affects the first tokens."""

    def plant(w: World) -> None:
        near = (1 - (w.place - PROMPT) / first).clamp(0, 1)[:, None]
        w.score(trainer=w.trainer + w.noise(far) * near.sqrt())

    return plant


def clipped(side: str, floor: float) -> Fault:
    def plant(w: World) -> None:
        w.columns[side] = w.columns[side].clamp(min=floor)

    return plant


def constant_rows(side: str, share: float = 1.0) -> Fault:
    """Put the mean of the row at every token."""

    def plant(w: World) -> None:
        values, mask = w.columns[side], w.columns["mask"]
        none, of = torch.zeros(w.rows), w.segment[mask]
        counts = none.index_add(0, of, torch.ones(len(of)))
        means = none.index_add(0, of, values[mask]) / counts
        w.columns[side] = torch.where(w.pick_rows(share), means[w.segment], values)

    return plant


def unnormalised(side: str, *, share: float = 1.0) -> Fault:
    """Return the logit less the largest one, without the normalisation."""

    def plant(w: World) -> None:
        logits = w.engine if side == "logp_rollout" else w.trainer
        values = (logits - logits.max(-1, keepdim=True).values).gather(-1, w.tokens[:, None])[:, 0]
        w.columns[side] = torch.where(w.pick_rows(share), values, w.columns[side])

    return plant


def first_filled(value: float) -> Fault:
    """Leave out the engine's log-probability of its first token."""

    def plant(w: World) -> None:
        first = w.place == PROMPT
        for name in ("logp_rollout", "logp_trainer"):
            w.columns[name] = torch.where(first, w.columns[name] - 0.5, w.columns[name])
        w.columns["logp_rollout"] = torch.where(first, value, w.columns["logp_rollout"])

    return plant


def probabilities() -> Fault:
    def plant(w: World) -> None:
        w.columns["logp_rollout"] = w.columns["logp_rollout"].exp()

    return plant


def likeliest() -> Fault:
    """Record the engine's likeliest token's value in place of the sampled one's."""

    def plant(w: World) -> None:
        w.columns["logp_rollout"] = w.engine.log_softmax(-1).max(-1).values

    return plant


def cut(length: int, value: float | None) -> Fault:
    """Repeat the last value from this token on, or put another one there."""

    def plant(w: World) -> None:
        start = w.lengths.cumsum(0) - w.lengths
        at = (start + torch.minimum(w.lengths - 1, torch.tensor(PROMPT + length)))[w.segment]
        behind = w.place >= PROMPT + length
        values = w.columns["logp_rollout"]
        repeated = values[at] if value is None else torch.full_like(values, value)
        w.columns["logp_rollout"] = torch.where(behind, repeated, values)

    return plant


def equal_sides() -> Fault:
    """Make both sides one array."""

    def plant(w: World) -> None:
        w.columns["logp_trainer"] = w.columns["logp_rollout"].clone()

    return plant


def duplicated(share: float) -> Fault:
    """Repeat rows."""

    def plant(w: World) -> None:
        rows = w.pick_rows(share)
        chosen = w.segment[rows].unique()
        again = torch.isin(w.segment, chosen)
        per_token = {name for name, values in w.columns.items() if len(values) == len(w.segment)}
        for name, values in w.columns.items():
            picked = values[again] if name in per_token else values[chosen]
            w.columns[name] = torch.cat([values, picked])
        w.lengths = torch.cat([w.lengths, w.lengths[chosen]])
        w.segment = torch.arange(len(w.lengths)).repeat_interleave(w.lengths)

    return plant


def rounded(dtype: torch.dtype) -> Fault:
    def plant(w: World) -> None:
        for side in ("logp_rollout", "logp_trainer"):
            w.columns[side] = w.columns[side].to(dtype).float()

    return plant


def nan(share: float) -> Fault:
    return filled(math.nan, share)


def same_for_group(share: float, size: int = 4) -> Fault:
    """Give all rows of a group the values of its first row."""

    def plant(w: World) -> None:
        starts = (w.lengths.cumsum(0) - w.lengths).tolist()
        values = w.columns["logp_rollout"]
        for first in range(0, round(share * w.rows) - size + 1, size):
            for row in range(first + 1, first + size):
                n = int(min(w.lengths[first], w.lengths[row]))
                values[starts[row] : starts[row] + n] = values[starts[first] : starts[first] + n]

    return plant


ROLLOUT, TRAINER = "logp_rollout", "logp_trainer"
BASE_10, COLD = scaled(ROLLOUT, 1 / math.log(10)), temperature(0.7, reported=True)
HOT = ("temperature",)
FAULTS: dict[str, Planted] = {
    # listed
    "T 0.7, processed": Planted(COLD, HOT),
    "T 0.7, processed, no entropy": Planted(_both(COLD, _without("entropy"))),
    "T 0.7, raw": Planted(temperature(0.7, reported=False), ("support", "temperature")),
    "T 0.7, raw, no entropy": Planted(_both(temperature(0.7, reported=False), _without("entropy"))),
    "top-k 5": Planted(narrowed(top_k=5), ("support",)),
    "top-k 20": Planted(narrowed(top_k=20), ("support",)),
    "top-p 0.95": Planted(narrowed(top_p=0.95), ("support",)),
    "base 10, rollout": Planted(BASE_10, ("scale",)),
    "base 10, no entropy": Planted(_both(BASE_10, _without("entropy")), ("scale",)),
    "shift, second turn, all": Planted(shifted(1, turn=True), ("shift",)),
    "shift, second turn, 50%": Planted(shifted(1, turn=True, share=0.5), ("shift",)),
    "shift, second turn, 25%": Planted(shifted(1, turn=True, share=0.25), ("shift",)),
    "shift, second turn, 8%": Planted(shifted(1, turn=True, share=0.08), ("shift",)),
    "end token 0": Planted(ending(0.0), ("fill",)),
    "end token -9999": Planted(ending(-9999.0), ("fill",)),
    "stale half, declared": Planted(stale(0.5, declared=True), ("stale",)),
    "stale half, version wrong": Planted(stale(0.5), ("stale",)),
    "stale half, no version": Planted(stale(0.5, version=False), ("stale",)),
    "stale from token 30, declared": Planted(stale(0.5, 3.0, declared=True, since=30), ("stale",)),
    "prompts in mask, both sides": Planted(prompts_in_mask(None), ("mask",)),
    "prompts in mask, rollout 0": Planted(prompts_in_mask(0.0), ("fill",)),
    "prompts in mask, both 0": Planted(prompts_in_mask(0.0, both=True), ("fill",)),
    "padding in mask, both 0": Planted(padding_in_mask(0.0), ("fill",)),
    "merged token, 50%": Planted(merged(0.5), ("retokenised",)),
    "copy": Planted(equal_sides()),
    "swapped rows, all": Planted(swapped(1.0), ("rows",)),
    "replica, 1 of 4": Planted(stale(0.25, 0.8), ("stale",)),
    "system prompt missing": Planted(other_context(10, 1.2), ("context",)),
    "row means": Planted(constant_rows(ROLLOUT), ("constant",)),
    "negated": Planted(scaled(ROLLOUT, -1.0)),
    # of other sizes, shares, places and kinds
    "T 1.3, processed": Planted(temperature(1.3, reported=True), ("temperature",)),
    "T 1.12, raw": Planted(temperature(1.12, reported=False)),
    "T 1.3, raw": Planted(temperature(1.3, reported=False)),
    "T 0.9, processed": Planted(temperature(0.9, reported=True), ("temperature",)),
    "T 0.6, processed, 30% of rows": Planted(temperature(0.6, reported=True, share=0.3), HOT),
    "T 1.4 in the trainer": Planted(trainer_temperature(1.4), ("temperature",)),
    "T 0.6 in the trainer, half": Planted(trainer_temperature(0.6, 0.5), ("temperature",)),
    "top-k 3, no entropy": Planted(_both(narrowed(top_k=3), _without("entropy")), ("support",)),
    "top-p 0.8": Planted(narrowed(top_p=0.8), ("support",)),
    "base 2, rollout": Planted(scaled(ROLLOUT, 1 / math.log(2)), ("scale",)),
    "base 2, trainer": Planted(scaled(TRAINER, 1 / math.log(2)), ("scale",)),
    "halved, trainer": Planted(scaled(TRAINER, 0.5), ("scale",)),
    "per character, rollout": Planted(per_character(ROLLOUT), ("scale",)),
    "per character, trainer": Planted(per_character(TRAINER), ("scale",)),
    "shift by 1, all": Planted(shifted(1), ("shift",)),
    "shift by -1, all, trainer": Planted(shifted(-1, side=TRAINER), ("shift",)),
    "shift by 2, all": Planted(shifted(2), ("shift",)),
    "shift by 1, 20% of rows": Planted(shifted(1, share=0.2), ("shift",)),
    "shift by 2, second turn, 30%": Planted(shifted(2, turn=True, share=0.3), ("shift",)),
    "end token -100, trainer": Planted(ending(-100.0, side=TRAINER), ("fill",)),
    "last three 0": Planted(ending(0.0, last=3), ("fill",)),
    "filled with -9999, 1%": Planted(filled(-9999.0, 0.01), ("fill",)),
    "filled with -1, 2%": Planted(filled(-1.0, 0.02), ("fill",)),
    "filled with -20, 0.5%, trainer": Planted(filled(-20.0, 0.005, side=TRAINER), ("fill",)),
    "filled with 0, 3%": Planted(filled(0.0, 0.03), ("fill",)),
    "NaN, 5%": Planted(nan(0.05), ("fill",)),
    "stale 10%, version wrong": Planted(stale(0.1, 0.7), ("stale",)),
    "stale 30%, far": Planted(stale(0.3, 1.5, version=False), ("stale",)),
    "stale from token 20, version wrong": Planted(stale(0.5, 1.0, since=20)),
    "padding in mask, both -1": Planted(padding_in_mask(-1.0), ("fill",)),
    "merged token, 20%": Planted(merged(0.2), ("retokenised",)),
    "two tokens lost, 40%": Planted(merged(0.4, lost=2), ("retokenised",)),
    "other text, 30%": Planted(other_tokens(0.3), ("retokenised",)),
    "swapped rows, 10%": Planted(swapped(0.1), ("rows",)),
    "swapped rows, two": Planted(swapped(0.0, TRAINER), ("rows",)),
    "copied rows, 30%": Planted(copied(0.3), ("copy",)),
    "group has one row's values": Planted(same_for_group(1.0), ("rows",)),
    "system prompt, first 4": Planted(other_context(4, 2.0), ("context",)),
    "row means, trainer, half": Planted(constant_rows(TRAINER, 0.5), ("constant",)),
    "clipped at -3, rollout": Planted(clipped(ROLLOUT, -3.0), ("fill",)),
    "clipped at -1, trainer": Planted(clipped(TRAINER, -1.0), ("fill",)),
    "clipped at -5, trainer": Planted(clipped(TRAINER, -5.0), ("fill",)),
    "logits, rollout": Planted(unnormalised(ROLLOUT)),
    "logits, trainer": Planted(unnormalised(TRAINER)),
    "logits, rollout, 20% of rows": Planted(unnormalised(ROLLOUT, share=0.2)),
    "likeliest token's value": Planted(likeliest()),
    "cut at 64, last value repeated": Planted(cut(64, None)),
    "cut at 64, 0": Planted(cut(64, 0.0), ("fill",)),
    "cut at 64, -1e-4": Planted(cut(64, -1e-4)),
    "clipped at -2, both": Planted(_both(clipped(ROLLOUT, -2), clipped(TRAINER, -2)), ("fill",)),
    "filled with 0, the first token": Planted(first_filled(0.0), ("fill",)),
    "filled with -7, the first token": Planted(first_filled(-7.0), ("fill",)),
    "T 0.7 and shifted": Planted(_both(COLD, shifted(1)), ("shift",)),
    "T 0.8, raw": Planted(temperature(0.8, reported=False), ("support", "temperature")),
    "T 1.5, raw, half of the rows": Planted(temperature(1.5, reported=False, share=0.5)),
    "top-k 2, raw": Planted(narrowed(top_k=2, reported=False), ("support",)),
    "top-p 0.9, raw": Planted(narrowed(top_p=0.9, reported=False), ("support",)),
    "top-p 0.95, raw": Planted(narrowed(top_p=0.95, reported=False), ("support",)),
    "shift by 1 from token 25": Planted(shifted(1, since=25), ("shift",)),
    "shift by -1 from token 25, 40%": Planted(shifted(-1, since=25, share=0.4), ("shift",)),
    "probabilities": Planted(probabilities()),
    "other weights, 3% of uneven rows": Planted(_both(uneven(), stale(0.03, 3.0, version=False))),
    "masked prompts, 5 uneven rows": Planted(_both(uneven(), blind(5))),
    "duplicated rows": Planted(duplicated(0.3)),
}


@functools.lru_cache(maxsize=2)
def _sound(seed: int, gap: str, rows: int) -> World:
    """Return a world to copy. Making it takes most of the time of an outcome."""
    return world(seed, gap, rows=rows)


def outcome(name: str, seed: int, gap: str, rows: int = ROWS) -> Outcome:
    """Return (action, causes, words) of an audit; `refused` if it refuses the dump."""
    w = _sound(seed, gap, rows).copy()
    FAULTS[name].plant(w)
    try:
        said = w.audited().verdict
    except UsageError as error:
        return "refused", (), str(error)
    return said.action, said.causes, said.text()


def routed(w: World, differs: Tensor) -> None:
    """Record routes: at these tokens, [n] bool, a layer chooses one other expert on the trainer's
    side."""
    layers, experts, k = 2, 16, 4
    drawn = torch.rand(len(w.tokens), layers, experts, generator=w.generator)
    chosen = drawn.argsort(-1)[..., : k + 1].clone()
    trainer = chosen[..., :k].clone()
    trainer[:, 0, 0] = torch.where(differs, chosen[:, 0, k], trainer[:, 0, 0])
    rollout = chosen[..., :k].flatten()
    w.columns |= {"routes_rollout": rollout, "routes_trainer": trainer.flatten()}
    shape = {"route_layers": layers, "route_top_k": k}
    w.columns |= {name: torch.full((w.rows,), value) for name, value in shape.items()}


def growing(w: World, last: float = 0.4) -> None:
    """Let the noise of every logit grow along the answer, whatever the experts."""
    size = 0.02 + (last - 0.02) * ((w.place - PROMPT) / LONGEST).clamp(0, 1)[:, None]
    w.engine = w.trainer + w.noise(1.0) * size
    w.draw(w.engine)


def clean(seed: int, gap: str, *, routes: bool = False, **settings: object) -> AuditResult:
    """Audit a clean world. routes: with routes, which differ where the logits are far apart."""
    w = world(seed, gap, **settings)  # type: ignore[arg-type]
    if routes:
        every, _, far = GAPS[gap]
        routed(w, (w.engine - w.trainer).std(-1) > (every + far) / 2)
    return w.audited()


ROUNDINGS = {"bfloat16": rounded(torch.bfloat16), "float16": rounded(torch.float16)}


def outcomes(seeds: range) -> dict[str, list[Outcome]]:
    """Return the outcomes of every fault in every world."""
    worlds = [(seed, gap) for seed in seeds for gap in (SMALL, MOE)]
    found: dict[str, list[Outcome]] = {name: [] for name in FAULTS}
    for seed, gap in worlds:
        for name, of_fault in found.items():
            of_fault.append(outcome(name, seed, gap))
    return found


def table(found: dict[str, list[Outcome]]) -> str:
    """Return a line of Markdown for each answer: its faults, and a note if not all are right."""
    alike: dict[str, list[str]] = {}
    for name, outcomes in found.items():
        actions = collections.Counter(action for action, _, _ in outcomes)
        named = collections.Counter(cause for _, causes, _ in outcomes for cause in causes)
        wanted = set(FAULTS[name].causes)
        right = sum(bool(wanted & set(causes)) for _, causes, _ in outcomes)
        note = f" ({right} of {len(outcomes)})" if wanted else " (no mark names it)"
        if right == len(outcomes):
            note = ""
        both = (actions, named)
        said, causes = (", ".join(key for key, _ in each.most_common()) for each in both)
        answer = f"{said}: {causes}" if causes else said
        alike.setdefault(f"**{answer}**{note}", []).append(name)
    return "\n".join(f"- {answer}: {'; '.join(names)}" for answer, names in alike.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(outcomes(range(20))))
