"""Bounds of a packed row's samples, and the chunks in which recurrent operators scan them.

A sample that begins has no state, so no operator may carry one over a boundary. A chunk holds
tokens of one sample only. The scan over chunks takes all samples at once, so it has as many steps
as the longest sample has chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a packed row, first those of the scan's first step, longest samples first.

    So the samples of a step are the first ones of the step before. If every sample has one chunk,
    the samples keep their order.
    """

    size: int
    places: Tensor  # [T] int64, chunk * size + column of each token
    steps: tuple[slice, ...]  # chunks of each step
    order: Tensor  # [S] int64, the samples as they are scanned
    inverse: Tensor  # [S] int64, place of each sample in `order`: also its first chunk
    last: Tensor  # [S] int64, last chunk of each sample
    ends_whole: Tensor  # [S] bool, True if that chunk has `size` tokens
    open: np.ndarray  # int64, the chunks that have fewer
    in_place: bool  # a chunk is a token and a sample, so nothing is moved

    @property
    def count(self) -> int:
        return self.steps[-1].stop

    def whole(self, step: slice) -> np.ndarray:
        """Return which of a step's chunks have `size` tokens, counted from its first, int64."""
        return np.setdiff1d(np.arange(step.start, step.stop), self.open) - step.start

    def fill(self, x: Tensor) -> Tensor:
        """Return [chunks, size, ...] of tokens [T, ...], with zeros where there is no token."""
        if self.in_place:
            return x[:, None]
        table = x.new_zeros(self.count * self.size, *x.shape[1:])
        return table.index_copy(0, self.places, x).unflatten(0, (-1, self.size))

    def read(self, chunks: Tensor) -> Tensor:
        """Return the tokens [T, ...] of chunks [chunks, size, ...]."""
        if self.in_place:
            return chunks[:, 0]
        return chunks.flatten(0, 1).index_select(0, self.places)

    def scan(self, state: Tensor, advance: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Carry states [S, ...] through the chunks of their samples; return the last ones.

        advance: maps a step's chunks and the states before them to the states after them.
        """
        if len(self.steps) == 1:
            return advance(self.steps[0], state)
        state, ended = state.index_select(0, self.order), []
        for chunks in self.steps:
            going_on = chunks.stop - chunks.start
            if going_on < len(state):
                ended.append(state[going_on:])
                state = state[:going_on]
            state = advance(chunks, state)
        ended.append(state)
        return torch.cat(ended[::-1]).index_select(0, self.inverse)


@dataclass(frozen=True, slots=True)
class Segments:
    """The samples of a packed row, in its order."""

    lengths: tuple[int, ...]  # tokens, at least 1 each
    device: torch.device
    fed: Tensor | None = None  # [S] int64, tokens of each sample in earlier rows; None: none
    _chunks: dict[tuple[int, bool], Chunks] = field(default_factory=dict)
    _tables: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    memo: dict[Any, Any] = field(default_factory=dict)  # what an operator made for all layers

    def chunks(self, size: int) -> Chunks:
        """Return the row's chunks of `size` tokens, made once."""
        if (size, False) not in self._chunks:
            self._chunks[size, False] = self._divide(size, np.array(0))
        return self._chunks[size, False]

    def aligned_chunks(self, size: int) -> Chunks:
        """Return chunks that begin `size` tokens apart from a sample's very first token, made once.

        The first ones have room in front for tokens of earlier rows.
        """
        if self.fed is None:
            return self.chunks(size)
        if (size, True) not in self._chunks:
            self._chunks[size, True] = self._divide(size, self.fed.cpu().numpy() % size)
        return self._chunks[size, True]

    @property
    def index(self) -> Tensor:
        """The sample of each token, [T] int64."""
        return self._on_device()[0]

    @property
    def bounds(self) -> Tensor:
        """The first token of each sample, and T: [S + 1] int64."""
        return self._on_device()[1]

    def _on_device(self) -> tuple[Tensor, Tensor]:
        """Return `index` and `bounds`, sent to the device once for all layers."""
        if not self._tables:
            lengths = np.array(self.lengths)
            index = np.arange(len(lengths)).repeat(lengths)
            bounds = np.concatenate([[0], lengths.cumsum()])
            self._tables.append((self._sent(index), self._sent(bounds)))
        return self._tables[0]

    def _sent(self, table: np.ndarray) -> Tensor:
        """Return a table on the device. numpy counts, because a dry run's tensors hold nothing."""
        return torch.from_numpy(table).to(self.device)

    def _divide(self, size: int, front: np.ndarray) -> Chunks:
        """Return the chunks of `size` tokens. front: [S] or [] int64, free places before tokens."""
        lengths = np.array(self.lengths)
        stops = lengths + front
        per_sample = -(-stops // size)
        order = np.argsort(-per_sample, kind="stable")
        inverse = np.argsort(order)
        step = np.arange(per_sample.max())
        in_step = (per_sample > step[:, None]).sum(1)
        ends = in_step.cumsum()
        starts = ends - in_step
        sample = np.arange(len(lengths)).repeat(lengths)
        position = np.arange(len(sample)) + (stops - lengths.cumsum())[sample]
        chunk = starts[position // size] + inverse[sample]
        last, whole = starts[per_sample - 1] + inverse, stops % size == 0
        return Chunks(
            size,
            self._sent(chunk * size + position % size),
            tuple(slice(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)),
            self._sent(order),
            self._sent(inverse),
            self._sent(last),
            self._sent(whole),
            last[~whole],
            in_place=size == 1 and len(step) == 1,
        )


@dataclass(frozen=True, slots=True)
class States:
    """A layer's states of an engine's rows, which samples bring along and leave behind."""

    tables: dict[tuple[int, str], Tensor]  # (layer, name) -> [num_rows, ...]; grows
    layer: int
    num_rows: int
    rows: Tensor  # [S] int64, each sample's row of the tables
    begins: Tensor | None = None  # [S] bool, True where no token was fed before; None: nowhere

    def table(self, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the states [num_rows, *shape] of all rows, which a decoding operator may change.

        They have x's dtype and device.
        """
        if (self.layer, name) not in self.tables:
            self.tables[self.layer, name] = x.new_zeros(self.num_rows, *shape)
        return self.tables[self.layer, name]

    def read(self, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of the states [S, *shape] before the samples' first tokens.

        They are zeros where a row begins.
        """
        found = self.table(name, x, shape).index_select(0, self.rows)
        if self.begins is None:
            return found
        return found.masked_fill_(self.begins.view(-1, *(1 for _ in shape)), 0.0)

    def write(self, name: str, states: Tensor) -> None:
        """Keep the samples' states [S, ...] after their last token."""
        self.table(name, states, states.shape[1:]).index_copy_(0, self.rows, states)

    def update(self, name: str, fade: Tensor, x: Tensor, y: Tensor) -> None:
        """Let the samples' states become state * fade + x * y, factors that broadcast to [S, ...].

        In place for all rows, if few of them stay as they are.
        """
        table = self.tables[self.layer, name]
        if 2 * len(self.rows) < self.num_rows:
            state = table.index_select(0, self.rows).mul_(fade).addcmul_(x, y)
            table.index_copy_(0, self.rows, state)
            return
        if not self._is_whole():
            fade, x, y = (self._of_all_rows(*each) for each in ((fade, 1.0), (x, 0.0), (y, 0.0)))
        table.mul_(fade).addcmul_(x, y)

    def _is_whole(self) -> bool:
        """Return whether the samples are those of all rows, in order; a GPU is not asked."""
        if len(self.rows) != self.num_rows or self.rows.device.type != "cpu":
            return False
        return torch.equal(self.rows, torch.arange(self.num_rows, device="cpu"))

    def _of_all_rows(self, factor: Tensor, stays: float) -> Tensor:
        """Return a factor [num_rows, ...]. It is `stays` in rows of no sample."""
        whole = factor.new_full((self.num_rows, *factor.shape[1:]), stays)
        return whole.index_copy_(0, self.rows, factor)


@dataclass(frozen=True, slots=True)
class Row:
    """The packed row that a recurrent layer computes."""

    segments: Segments
    states: States | None = None  # None: every sample begins anew, and leaves nothing behind

    @property
    def decodes(self) -> bool:
        """True if an engine feeds one token a sample."""
        return self.states is not None and max(self.segments.lengths) == 1

    @property
    def begins(self) -> bool:
        """True if no sample goes on from tokens of an earlier row."""
        if self.states is None:
            return True
        return self.states.begins is not None and self.segments.fed is None

    def chunks(self, size: int) -> Chunks:
        """Return the chunks to scan: those of a decoding row have one token."""
        if self.decodes:
            size = 1
        return self.segments.chunks(size)

    def before(self, name: str, x: Tensor, *shape: int) -> Tensor:
        """Return states [S, *shape] of the samples before their first token, of x's dtype."""
        if self.states is None:
            return x.new_zeros(len(self.segments.lengths), *shape)
        return self.states.read(name, x, shape)

    def after(self, name: str, states: Tensor) -> None:
        """Keep states [S, ...] of the samples after their last token, if anybody wants them."""
        if self.states is not None:
            self.states.write(name, states)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which float32 products stay float32, as in kernels of these scans."""
    if x.device.type == "meta":  # which knows no autocast
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
