"""A token path that grows turn by turn, with the route of every token that the engine fed.

It takes and returns token ids, never text. Everything is kept per token, so cutting, forking and
joining never shift an index; slots (`types.py`) appear when the path becomes a `Sample`. A token
has a route once a forward pass has fed it. The last token therefore has none until the next turn's
prefill.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from onepolicy.config import DuplicateRoutes
from onepolicy.support.trace import KeptSet, SupportTrace
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
OBSERVED = -1  # turn and version of a token that the policy did not sample


class Trajectory:
    """A path of prompt, sampled and observed tokens."""

    def __init__(
        self, prompt_ids: Sequence[int], *, duplicate_routes: DuplicateRoutes = "as-sampled"
    ) -> None:
        """Start a path. duplicate_routes: see `RouteBuffer.merge`."""
        assert prompt_ids, "a response needs at least one prompt token to be predicted from"
        self.tokens = list(prompt_ids)
        self._turn = [OBSERVED] * len(self.tokens)
        self._logp = [float("nan")] * len(self.tokens)
        self._version = [OBSERVED] * len(self.tokens)
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}  # token -> [k] top_ids, [k] top_logp
        self._sets: dict[int, KeptSet] = {}  # token -> what it was drawn from
        self._routes = RouteBuffer(duplicate_routes)
        self._fingerprints: list[frozenset[str]] = []  # of each completion
        self.turns = 0
        self.finish: FinishReason = "stop"  # of the last turn

    def append_observation(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled: a reply, or the template's tokens between turns."""
        self.tokens += ids
        self._turn += [OBSERVED] * len(ids)
        self._logp += [float("nan")] * len(ids)
        self._version += [OBSERVED] * len(ids)

    def append_completion(self, completion: Completion) -> None:
        """Append a completion that the engine sampled after exactly these tokens.

        After an aborted completion the same turn continues.
        """
        length, new = len(self.tokens), len(completion.token_ids)
        assert new, "a completion has at least one token"
        check_routing_rows(completion, length + new - 1)
        if not (self.turns and self.finish == "aborted" and self._turn[-1] == self.turns - 1):
            self.turns += 1
        self._routes.merge(completion, self._version)
        if completion.top_ids is not None and completion.top_logp is not None:
            tops = zip(completion.top_ids.cpu(), completion.top_logp.cpu(), strict=True)
            self._tops |= zip(range(length, length + new), tops, strict=True)
        if completion.support is not None:
            self._sets |= zip(range(length, length + new), completion.support.split(), strict=True)
        self.tokens += completion.token_ids.tolist()
        self._turn += [self.turns - 1] * new
        self._logp += completion.logp.tolist()
        self._version += completion.version.tolist()
        self._fingerprints.append(frozenset(filter(None, [completion.fingerprint])))
        self.finish = completion.finish

    @property
    def first_missing_route(self) -> int:
        """The first token without a route: the engine must return routes from here on.

        It is passed on as `Sampling.routes_from`.
        """
        return min(self._routes.known_prefix(), len(self.tokens) - 1)

    def common_prefix(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens that `ids` and this path share."""
        for i, (a, b) in enumerate(zip(self.tokens, ids, strict=False)):
            if a != b:
                return i
        return min(len(self.tokens), len(ids))

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens and their data."""
        assert 1 <= length <= len(self.tokens)
        for kept in (self.tokens, self._turn, self._logp, self._version):
            del kept[length:]
        self._tops = {token: top for token, top in self._tops.items() if token < length}
        self._sets = {token: kept for token, kept in self._sets.items() if token < length}
        self._routes.truncate(length)
        self.turns = max(self._turn) + 1
        self.finish = "stop"

    def forget_last_route(self) -> None:
        """Take out the route of the last token, for that of the completion after it."""
        self._routes.truncate(len(self.tokens) - 1)

    def fork(self) -> Trajectory:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def rewrite_history(self, ids: Sequence[int]) -> Trajectory:
        """Return a new path of these tokens, all observed, with the routes of the common prefix."""
        new = Trajectory(ids, duplicate_routes=self._routes.duplicate_routes)
        new._routes = copy.deepcopy(self._routes)
        new._routes._refused[:], new._routes._known = False, 0  # no token is sampled any more
        new._routes.truncate(self.common_prefix(ids))
        new.turns = self.turns
        return new

    @property
    def sampled_tokens(self) -> int:
        return sum(turn != OBSERVED for turn in self._turn)

    def to_sample(
        self,
        *,
        reward: float,
        temperature: float,
        finish: FinishReason | None = None,
        events: tuple[str, ...] = (),
    ) -> Sample:
        """Return the path up to its last sampled token. Later observations predict nothing."""
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
            routing=self._routes.to_trace(length - 1),
            top_ids=self._stack_tops(0, 0, length),
            top_logp_rollout=self._stack_tops(1, float("nan"), length),
            fingerprints=merge_fingerprints(self._fingerprints),
            support=self._join_sets(length),
        )

    def _join_sets(self, length: int) -> SupportTrace | None:
        """Return the sets of all slots, empty where an observed token is predicted."""
        if not self._sets:
            return None
        empty = KeptSet(np.empty(0, np.int32))
        return SupportTrace.join([self._sets.get(i, empty) for i in range(1, length)])

    def _stack_tops(self, column: int, fill: float, length: int) -> Tensor | None:
        """Return [length - 1, k]: top_ids (column 0) or top_logp (1), `fill` where observed."""
        if not self._tops:
            return None
        tops = {token: top[column] for token, top in self._tops.items()}
        absent = torch.full_like(next(iter(tops.values())), fill)
        return torch.stack([tops.get(i, absent) for i in range(1, length)])


class RouteBuffer:
    """Routes by token, in buffers that double. Appending a turn costs its own length only."""

    def __init__(self, duplicate_routes: DuplicateRoutes) -> None:
        """Make an empty buffer. duplicate_routes: see `merge`."""
        self.duplicate_routes: DuplicateRoutes = duplicate_routes
        self._empty_trace: RoutingTrace | None = None  # the model's trace, without rows
        self._ids = torch.empty(0)  # [capacity, L, K]
        self._combine_weights: Tensor | None = None  # like ids
        self._valid = torch.zeros(0, dtype=torch.bool)  # [capacity]
        self._refused = torch.zeros(0, dtype=torch.bool)  # [capacity] came, but of newer weights
        self._version = torch.zeros(0, dtype=torch.int32)  # [capacity]
        self._source = torch.zeros(0, dtype=torch.uint8)  # [capacity] index into SOURCES
        self._known = 0

    def merge(self, completion: Completion, versions: Sequence[int]) -> None:
        """Merge the routing rows of a completion's forward passes.

        versions: of the path's tokens before it. `duplicate_routes` decides which row stays when
        several forward passes fed the same token:
        as-sampled: the first row; it belongs to the log-probability of the token after it, so none
        stays if that was sampled by older weights.
        as-cached: the last row, to which the keys in the engine's cache belong.
        newest: the row of the highest weight version, and of equal versions the first row.
        A row that was not captured replaces nothing.
        """
        if completion.routing is None:
            return
        trace, first = completion.routing.to("cpu"), completion.first_slot
        stop = first + len(trace)
        self._grow(trace, stop)
        version, source = _expand_spans(trace)
        replaced = self._rows_to_replace(trace, version, slice(first, stop))
        if self.duplicate_routes == "as-sampled":
            sampled = torch.tensor(versions[first + 1 : stop + 1], dtype=torch.int32)
            early = slice(0, len(sampled))  # the rows before a token of an earlier completion
            newer = replaced[early] & (sampled != OBSERVED) & (version[early] > sampled)
            self._refused[first : first + len(sampled)] |= newer
            replaced[early] &= ~newer
        rows = replaced.nonzero()[:, 0]
        self._ids[first + rows] = trace.ids[rows]
        if self._combine_weights is not None:
            assert trace.weights is not None
            self._combine_weights[first + rows] = trace.weights[rows]
        self._version[first + rows] = version[rows]
        self._source[first + rows] = source[rows]
        self._valid[first + rows] = True

    def _rows_to_replace(self, trace: RoutingTrace, version: Tensor, stored: slice) -> Tensor:
        """Return which rows of a trace replace the stored rows: [T] bool. version: [T] int32."""
        if self.duplicate_routes == "as-cached":
            return trace.valid
        newer = (version > self._version[stored]) & (self.duplicate_routes == "newest")
        return trace.valid & (~self._valid[stored] | newer)

    def known_prefix(self) -> int:
        """Return the number of leading tokens that all have a route, or get none any more."""
        closed = self._valid[self._known :] | self._refused[self._known :]
        self._known += int(closed.int().cumprod(0).sum())
        return self._known

    def truncate(self, length: int) -> None:
        last = max(length - 1, 0)  # refused for the sake of the token after it
        self._valid[length:] = self._refused[last:] = False
        self._known = min(self._known, last)

    def to_trace(self, slots: int) -> RoutingTrace | None:
        """Return rows [0, slots), or None if no forward pass ever returned a row."""
        if self._empty_trace is None:
            return None
        self._grow(self._empty_trace, slots)
        valid = self._valid[:slots].clone()
        combine_weights = self._combine_weights
        if combine_weights is not None:
            combine_weights = combine_weights[:slots].clone()
        return RoutingTrace(
            self._ids[:slots].clone(),
            valid,
            self._empty_trace.layers,
            self._empty_trace.num_experts,
            _find_spans(valid, self._source[:slots], self._version[:slots]),
            combine_weights,
        )

    def _grow(self, trace: RoutingTrace, rows: int) -> None:
        if self._empty_trace is None:
            self._empty_trace = trace.rows(0, 0)
            self._ids = trace.ids[:0]
            if trace.weights is not None:
                self._combine_weights = trace.weights[:0]
        if rows <= len(self._valid):
            return
        more = max(rows, 2 * len(self._valid), 64) - len(self._valid)
        for name in ("_ids", "_valid", "_refused", "_version", "_source", "_combine_weights"):
            if getattr(self, name) is not None:
                setattr(self, name, _extend_rows(getattr(self, name), more))


def check_routing_rows(completion: Completion, slots: int) -> None:
    """Raise ValueError unless a completion's routing rows end at the last slot of its path."""
    trace, first = completion.routing, completion.first_slot
    if trace is not None and first + len(trace) != slots:
        raise ValueError(
            f"the engine returned {len(trace)} routing rows from slot {first} on for a path of "
            f"{slots} slots; it must return rows {first} to {slots - 1}, one per slot"
        )


def _extend_rows(rows: Tensor, more: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(more, *rows.shape[1:])])


def _expand_spans(trace: RoutingTrace) -> tuple[Tensor, Tensor]:
    """Return version [T] int32 and source [T] uint8 of every row.

    Rows outside all spans count as prefill of version 0.
    """
    version = torch.zeros(len(trace), dtype=torch.int32)
    source = torch.full((len(trace),), SOURCES.index("prefill"), dtype=torch.uint8)
    for span in trace.spans:
        version[span.start : span.start + span.length] = span.version
        source[span.start : span.start + span.length] = SOURCES.index(span.source)
    return version, source


def _find_spans(valid: Tensor, source: Tensor, version: Tensor) -> tuple[RouteSpan, ...]:
    """Return the runs of equal source and version. Rows that were not captured have no span."""
    keys = torch.where(valid, version.long() * len(SOURCES) + source, -1)
    values, lengths = keys.unique_consecutive(return_counts=True)
    spans, start = [], 0
    for key, length in zip(values.tolist(), lengths.tolist(), strict=True):
        if key >= 0:
            spans.append(RouteSpan(start, length, SOURCES[key % len(SOURCES)], key // len(SOURCES)))
        start += length
    return tuple(spans)
