"""A token path as it grows turn by turn: what was sampled, what was observed, and the route of every fed token.

Token ids in, token ids out: nothing here knows text. Everything is kept per token, so that cutting, forking and joining
never shift anything; slots (`types.py`) appear when the path becomes a `Sample`. A token's route exists once a forward
has fed that token, so the last token has none until the next turn's prefill brings it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from onepolicy.config import RowPolicy
from onepolicy.types import (
    Completion,
    FinishReason,
    RouteSource,
    RouteSpan,
    RoutingTrace,
    Sample,
    merge_fingerprints,
)

SOURCES: tuple[RouteSource, ...] = get_args(RouteSource)
OBSERVED = -1  # turn, and version, of a token the policy did not sample


class Trajectory:
    def __init__(self, prompt_ids: Sequence[int], *, rows: RowPolicy = "as-sampled") -> None:
        """rows: which route stays where a later forward fed the same token again (`Routes.put`)."""
        assert prompt_ids, "a response needs at least one prompt token to be predicted from"
        self.tokens = list(prompt_ids)
        self._turn = [OBSERVED] * len(self.tokens)
        self._logp = [float("nan")] * len(self.tokens)
        self._version = [OBSERVED] * len(self.tokens)
        self._tops: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # token -> its [k] top_ids and top_logp, where asked for
        self._routes = Routes(rows)
        self._fingerprints: list[frozenset[str]] = []  # of each completion
        self.turns = 0
        self.finish: FinishReason = "stop"  # of the last turn

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens the policy did not sample: a tool's reply, the template's tokens between turns."""
        self.tokens += ids
        self._turn += [OBSERVED] * len(ids)
        self._logp += [float("nan")] * len(ids)
        self._version += [OBSERVED] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Append what the engine sampled after exactly these tokens. After an aborted completion the turn goes on."""
        new = len(completion.token_ids)
        assert new, "a completion has at least one token"
        check_rows(completion, len(self.tokens) + new - 1)
        if not (self.turns and self.finish == "aborted" and self._turn[-1] == self.turns - 1):
            self.turns += 1
        self._routes.put(completion)
        if completion.top_ids is not None and completion.top_logp is not None:
            here = range(len(self.tokens), len(self.tokens) + new)
            self._tops |= zip(
                here,
                zip(completion.top_ids.cpu(), completion.top_logp.cpu(), strict=True),
                strict=True,
            )
        self.tokens += completion.token_ids.tolist()
        self._turn += [self.turns - 1] * new
        self._logp += completion.logp.tolist()
        self._version += completion.version.tolist()
        self._fingerprints.append(frozenset(filter(None, [completion.fingerprint])))
        self.finish = completion.finish

    @property
    def next_route(self) -> int:
        """The first token whose route is not known: what an engine must return from (`Sampling.routes_from`)."""
        return min(self._routes.known(), len(self.tokens) - 1)

    def common_prefix(self, ids: Sequence[int]) -> int:
        """How many tokens `ids` and this path share at the start."""
        pairs = zip(self.tokens, ids, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(ids))
        )

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and what is known of them."""
        assert 1 <= length <= len(self.tokens)
        for kept in (self.tokens, self._turn, self._logp, self._version):
            del kept[length:]
        self._tops = {token: top for token, top in self._tops.items() if token < length}
        self._routes.truncate(length)
        self.turns = max(self._turn) + 1
        self.finish = "stop"

    def fork(self) -> Trajectory:
        """An independent copy."""
        return copy.deepcopy(self)

    def rewritten(self, ids: Sequence[int]) -> Trajectory:
        """A path of these tokens instead, all of them observed: a history the template rendered anew. Only the routes
        before the first difference are still known. Turns count on; what was sampled stays with the old path."""
        other = Trajectory(ids, rows=self._routes.policy)
        other._routes = copy.deepcopy(self._routes)
        other._routes.truncate(self.common_prefix(ids))
        other.turns = self.turns
        return other

    @property
    def sampled_tokens(self) -> int:
        return sum(turn != OBSERVED for turn in self._turn)

    def sample(
        self,
        *,
        reward: float,
        temperature: float,
        finish: FinishReason | None = None,
        events: tuple[str, ...] = (),
    ) -> Sample:
        """The path up to its last sampled token. Observations after that are predicted by nobody."""
        length = max(i for i, turn in enumerate(self._turn) if turn != OBSERVED) + 1
        turn = torch.tensor(self._turn[1:length], dtype=torch.int32)
        return Sample(
            tokens=torch.tensor(self.tokens[:length], dtype=torch.int32),
            trainable=turn != OBSERVED,
            logp_rollout=torch.tensor(self._logp[1:length], dtype=torch.float32),
            version=torch.tensor(self._version[1:length], dtype=torch.int32),
            turn=turn,
            temperature=temperature,
            reward=reward,
            finish=finish or self.finish,
            events=events,
            routing=self._routes.trace(length - 1),
            top_ids=self._top(0, 0, length),
            top_logp_rollout=self._top(1, float("nan"), length),
            fingerprints=merge_fingerprints(self._fingerprints),
        )

    def _top(self, which: int, fill: float, length: int) -> Tensor | None:
        """[length - 1, k]: top_ids (0) or top_logp (1) of the token a slot predicts, `fill` where it was observed."""
        if not self._tops:
            return None
        absent = torch.full_like(next(iter(self._tops.values()))[which], fill)
        return torch.stack(
            [self._tops[i][which] if i in self._tops else absent for i in range(1, length)]
        )


class Routes:
    """Routes by token, in buffers that double, so that a turn costs what it adds and not what came before."""

    def __init__(self, policy: RowPolicy) -> None:
        self.policy = policy
        self._model: RoutingTrace | None = None  # whose rows these are (no rows of its own)
        self._ids = torch.empty(0)  # [capacity, L, K]
        self._weights: Tensor | None = None  # like ids
        self._valid = torch.zeros(0, dtype=torch.bool)  # [capacity]
        self._version = torch.zeros(0, dtype=torch.int32)  # [capacity]
        self._source = torch.zeros(0, dtype=torch.uint8)  # [capacity] index into SOURCES
        self._known = 0

    def put(self, completion: Completion) -> None:
        """Merge the rows of a completion's forward.

        as-sampled: the first forward that fed a token stays, for a sampled token the one its log-probability came from.
        as-cached: the last one returned stays, which is what the keys in the engine's cache belong to. newest: the one
        of the highest weight version stays, of equal ones the first. A row that was not captured replaces nothing.
        """
        if completion.routing is None:
            return
        trace, first = completion.routing.to("cpu"), completion.first_slot
        stop = first + len(trace)
        self._grow(trace, stop)
        here = slice(first, stop)
        version, source = _by_row(trace)
        take = trace.valid & ~self._valid[here]
        if self.policy == "as-cached":
            take = trace.valid
        elif self.policy == "newest":
            take = take | (trace.valid & (version > self._version[here]))
        rows = take.nonzero()[:, 0]
        self._ids[first + rows] = trace.ids[rows]
        if self._weights is not None:
            assert trace.weights is not None
            self._weights[first + rows] = trace.weights[rows]
        self._version[first + rows] = version[rows]
        self._source[first + rows] = source[rows]
        self._valid[first + rows] = True

    def known(self) -> int:
        """Tokens from the start on whose routes are all there."""
        while self._known < len(self._valid) and self._valid[self._known]:
            left = self._valid[self._known :]
            self._known += len(left) if bool(left.all()) else int(left.int().argmin())
        return self._known

    def truncate(self, length: int) -> None:
        self._valid[length:] = False
        self._known = min(self._known, length)

    def trace(self, slots: int) -> RoutingTrace | None:
        """Rows [0, slots); None if no forward ever returned any."""
        if self._model is None:
            return None
        self._grow(self._model, slots)
        valid = self._valid[:slots].clone()
        return RoutingTrace(
            self._ids[:slots].clone(),
            valid,
            self._model.layers,
            self._model.num_experts,
            _spans(valid, self._source[:slots], self._version[:slots]),
            None if self._weights is None else self._weights[:slots].clone(),
        )

    def _grow(self, trace: RoutingTrace, rows: int) -> None:
        if self._model is None:
            self._model = trace.rows(0, 0)
            self._ids = trace.ids[:0]
            self._weights = None if trace.weights is None else trace.weights[:0]
        if rows <= len(self._valid):
            return
        more = max(rows, 2 * len(self._valid), 64) - len(self._valid)
        self._ids, self._valid, self._version, self._source = (
            _longer(x, more) for x in (self._ids, self._valid, self._version, self._source)
        )
        if self._weights is not None:
            self._weights = _longer(self._weights, more)


def check_rows(completion: Completion, slots: int) -> None:
    trace, first = completion.routing, completion.first_slot
    if trace is not None and first + len(trace) != slots:
        raise ValueError(
            f"the engine returned {len(trace)} routing rows from slot {first} on for a path of {slots} slots; "
            f"it must return rows {first} to {slots - 1}, one per slot"
        )


def _longer(rows: Tensor, more: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])


def _by_row(trace: RoutingTrace) -> tuple[Tensor, Tensor]:
    """version [T] int32 and source [T] uint8 of every row. Rows no span names count as prefill of version 0."""
    version = torch.zeros(len(trace), dtype=torch.int32)
    source = torch.full((len(trace),), SOURCES.index("prefill"), dtype=torch.uint8)
    for span in trace.spans:
        version[span.start : span.start + span.length] = span.version
        source[span.start : span.start + span.length] = SOURCES.index(span.source)
    return version, source


def _spans(valid: Tensor, source: Tensor, version: Tensor) -> tuple[RouteSpan, ...]:
    """Runs of equal source and version; rows that were not captured belong to none."""
    keys = torch.where(valid, version.long() * len(SOURCES) + source, -1)
    spans, start = [], 0
    for key, length in zip(
        *(x.tolist() for x in keys.unique_consecutive(return_counts=True)), strict=True
    ):
        if key >= 0:
            spans.append(RouteSpan(start, length, SOURCES[key % len(SOURCES)], key // len(SOURCES)))
        start += length
    return tuple(spans)
