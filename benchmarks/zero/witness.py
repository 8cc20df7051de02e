"""What a run sampled beside what it trains on: counts by turn, and a row for every conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onepolicy.build.components import Components
from onepolicy.divergence.routing import router_differences
from onepolicy.gateway.history import History
from onepolicy.gateway.program_sandbox import Ended
from onepolicy.gateway.program_task import Programs
from onepolicy.gateway.traces import dump_rows
from onepolicy.gateway.turns import Reason
from onepolicy.notation import counted
from onepolicy.record.export import write_step
from onepolicy.run.step import Hook, StepResult, StepTimer
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch

PROMPT = -1
"""Turn of what the policy did not sample: prompts, replies, histories that a client sent anew."""


@dataclass
class Turn:
    """Counts of one turn of all conversations."""

    tokens: int = 0  # sampled, with a log-probability on both sides
    values: int = 0  # that differ
    routes: int = 0  # (token, layer) pairs with experts on both sides
    routes_differing: int = 0
    outside: int = 0  # sampled tokens that are not in their own support
    newest: int = 0  # values that would differ under the newest weights, as a control
    free: int = 0  # tokens with a choice: over a support of one token both sides are exactly 0
    older: int = 0  # tokens with a choice of older weights: what the control can differ in


def total_of(turns: Iterable[Turn]) -> Turn:
    """Return the sums of the turns' counts."""
    found = Turn()
    for turn in turns:
        for name in vars(found):
            setattr(found, name, getattr(found, name) + getattr(turn, name))
    return found


@dataclass
class Counts:
    """What a run has shown so far."""

    turns: dict[int, Turn] = field(default_factory=dict)
    by_version: Counter[int] = field(default_factory=Counter)  # tokens
    by_age: Counter[int] = field(default_factory=Counter)  # tokens, by updates since
    samples: int = 0
    spanning: int = 0  # samples with tokens of several versions
    support: float = 0.0  # sum of the sizes of supports
    rewards: list[float] = field(default_factory=list)  # mean of each step
    weights: list[str] = field(default_factory=list)  # a digest of each step's
    requests: Counter[str] = field(default_factory=Counter)  # of the gateway, by reason

    @property
    def total(self) -> Turn:
        return total_of(self.turns.values())

    @property
    def is_zero(self) -> bool:
        """True if nothing differs although the weights changed. Steps whose groups all earn the
        same may leave them."""
        total, moved = self.total, len(set(self.weights)) > 1
        return moved and not (total.values + total.routes_differing + total.outside)

    def line(self) -> str:
        """Return the sentence that all this is about."""
        found, total = self.requests, self.total
        apart = {
            "thoughts dropped": found[Reason.THOUGHTS_DROPPED],
            "retokenised": found[Reason.RETOKENISED],
            "title": found["auxiliary"],
        }
        parts = ", ".join(f"{name} ({number:,})" for name, number in apart.items())
        return (
            f"{total.values:,} of {total.tokens:,} log-probabilities differ between what was "
            f"sampled and what is trained, {total.free:,} of them with a choice; "
            f"{sum(apart.values()):,} requests stand apart: {parts}"
        )

    def describe(self) -> str:
        """Return what was played and compared, a line each."""
        found, total = self.requests, self.total
        older = sum(number for age, number in self.by_age.items() if age)
        size = self.support / max(1, total.tokens)
        spanning = f"{self.spanning} of {counted(self.samples, 'path')}"
        routes = f"{total.routes_differing:,} of {total.routes:,}"
        return "\n".join(
            [
                f"{found['episodes']} programs, {found['turns']:,} turns, "
                f"{counted(found[Reason.COMPACTION], 'compaction')}; mean reward by step "
                + " ".join(f"{reward:.2f}" for reward in self.rewards),
                f"{len(set(self.weights))} different weights sampled; {older:,} tokens are "
                f"older than the update they are in, {spanning} span an update",
                f"under the newest weights {total.newest:,} log-probabilities would differ, of "
                f"{total.older:,} older ones with a choice",
                f"{routes} choices of experts differ; {total.outside:,} tokens are outside the "
                f"{size:.2f} that top_p left on average",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        turns = {number: vars(turn) for number, turn in sorted(self.turns.items())}
        return vars(self) | {"turns": turns}

    def add(self, own: TokenBatch, newest: Tensor, step: int) -> None:
        """Count a batch that was scored under the weights which sampled its tokens.

        newest: [T] float32, log-probabilities under the weights of now.
        """
        assert own.logp_old is not None
        assert own.support is not None
        mask, turns = own.trainable, own.turn.masked_fill(~own.trainable, PROMPT)
        wrong = mask & (own.logp_old != own.logp_rollout)
        outside = mask & ~own.support.contains(own.target_ids)
        moved = mask & (newest != own.logp_rollout)
        free = mask & (own.support.sizes > 1)
        older = free & (own.version < step)
        routes, differing = _compare_routes(own)
        for number in turns.unique().tolist():
            turn, of = self.turns.setdefault(number, Turn()), turns == number
            turn.tokens += int((mask & of).sum())
            turn.values += int((wrong & of).sum())
            turn.outside += int((outside & of).sum())
            turn.newest += int((moved & of).sum())
            turn.free += int((free & of).sum())
            turn.older += int((older & of).sum())
            turn.routes += int(routes[of].sum())
            turn.routes_differing += int(differing[of].sum())
        versions = own.version[mask]
        self.by_version.update(versions.tolist())
        self.by_age.update((step - versions).tolist())
        self.support += float(own.support.sizes[mask].sum())
        self.samples += own.num_samples
        for sample in range(own.num_samples):
            of_sample = own.version[(own.segment == sample) & mask]
            self.spanning += len(of_sample.unique()) > 1


def _compare_routes(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return how many routers of each slot were compared, and how many differ: [T] int64 each."""
    assert batch.routing is not None
    assert batch.routing_native is not None
    both = batch.routing.valid & batch.routing_native.valid
    differing = (router_differences(batch.routing_native, batch.routing) > 0).sum(1)
    return both.long() * len(batch.routing.layers), differing * both


def digest(model: nn.Module) -> str:
    """Return a digest of all weights, to the bit."""
    found = blake2b(digest_size=8)
    for weight in model.parameters():
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


class Witness(Hook):
    """Counts a run's batches, and writes their rows, each with the version of its tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts = folder, Counts()
        self.scorer: PolicyScorer | None = None

    def watching(self, components: Components) -> Witness:
        """Begin a run. Return this hook."""
        self.scorer = components.learner.scorer  # type: ignore[attr-defined]
        return self

    def before_update(self, result: StepResult, step: int, timer: StepTimer) -> None:
        assert result.own is not None, "numerics = on-policy with rollout.max_staleness"
        assert self.scorer is not None
        self.counts.weights.append(digest(self.scorer.model))
        self.counts.add(result.own, self._under_newest(result.own), step)
        samples = [sample for group in result.groups for sample in group.samples]
        ends = {(i, s.episode): s.reward for i, g in enumerate(result.groups) for s in g.samples}
        self.counts.rewards.append(sum(ends.values()) / len(ends))
        rows = dump_rows(result.own, None, step=step, reward=0.0)
        for row, sample in zip(rows, samples, strict=True):
            row["reward"] = sample.reward
        write_step(self.folder, step, rows)

    def _under_newest(self, own: TokenBatch) -> Tensor:
        """Return [T] float32, log-probabilities of all tokens under the weights of now."""
        assert self.scorer is not None
        assert own.logp_old is not None
        newest = own.logp_old.clone()
        older = own.trainable & (own.version != self.scorer.version)
        samples = own.segment[older].unique().tolist()
        if samples:
            scored = self.scorer.score_unchecked(own.select(samples), replay=False).logp_old
            assert scored is not None
            newest[own.slots_of(samples)] = scored
        return newest

    def counting(self, count: Callable[..., None]) -> Callable[..., None]:
        """Return `Programs._count` that counts the requests of every program that ends too."""

        def counting(programs: Programs, ended: Ended, history: History, seconds: float) -> None:
            self.counts.requests.update(history.counts())
            self.counts.requests["episodes"] += 1
            count(programs, ended, history, seconds)

        return counting
