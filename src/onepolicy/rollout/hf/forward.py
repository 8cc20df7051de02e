"""Forwards of the model over the slab: decode one token of many rows, or prefill many tokens of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.models import decode_attention
from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.kv_cache import KVCache

MAX_SCORES = 1 << 22  # most attention scores per head of one prefill forward: bounds its memory
MAX_TOKENS = 4096  # most padded tokens of one prefill forward


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Positions [start, stop) of a slab row whose tokens are to be fed."""

    row: int
    start: int
    stop: int


class CachedForward:
    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        routers: Routers | None,
        *,
        combine_weights: bool = False,
    ) -> None:
        self.model, self.cache, self.routers, self._combine_weights = (
            model,
            cache,
            routers,
            combine_weights,
        )
        self._tape: RouteRecorder | None = None
        model.set_attn_implementation(decode_attention.NAME)
        if routers is not None:
            cache.allocate_routes(len(routers.layers), routers.top_k, routers.num_experts)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Held while forwards run; without a router bound it does nothing."""
        if self.routers is None:
            yield
            return
        with self.routers.record(weights=self._combine_weights) as tape:
            self._tape = tape
            try:
                yield
            finally:
                self._tape = None

    def __call__(self, ids: Tensor, step: KVCacheStep, logits_at: Tensor | None = None) -> Tensor:
        """ids [T] -> float32 logits [T, V], or [n, V] at tokens `logits_at` [n]. Writes keys, values and routes."""
        if is_invariant(self.model):
            step.round_keys(TILE)
        self.cache.set_step(step)
        out = self.model(
            input_ids=ids[None],
            position_ids=step.positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if logits_at is None else logits_at,
            kv_cache_step=step,
        )
        if self._tape is not None:
            self.cache.write_routes(self._tape.pop_ids(), self._tape.pop_weights())
        return out.logits[0].float()

    def prefill(self, tokens: Tensor, spans: list[RowSpan]) -> Tensor:  # tokens [rows, max_len]
        """Feed tokens[row, start:stop] of every span -> logits [spans, V] of each last token."""
        last: dict[int, Tensor] = {}
        for part in prefill_chunks(spans):
            step, ends = _prefill_step(part, tokens.device)
            logits = self(tokens[step.rows, step.positions], step, ends)
            last |= {span.row: row for span, row in zip(part, logits, strict=True)}
        return torch.stack([last[span.row] for span in spans])


def prefill_chunks(spans: list[RowSpan]) -> Iterator[list[RowSpan]]:
    """Cut what is too long for one forward and gather what is not; a row's pieces come in order."""
    together: list[RowSpan] = []
    width = keys = 0
    for span in sorted(spans, key=lambda s: s.stop - s.start):
        start = span.start
        most = max(1, min(MAX_TOKENS, MAX_SCORES // span.stop))
        while span.stop - start > most:
            yield [RowSpan(span.row, start, start + most)]
            start += most
        width, keys, count = max(width, span.stop - start), max(keys, span.stop), len(together) + 1
        if together and (count * width > MAX_TOKENS or count * width * keys > MAX_SCORES):
            yield together
            together, width, keys = [], span.stop - start, span.stop
        together.append(RowSpan(span.row, start, span.stop))
    if together:
        yield together


def _prefill_step(spans: list[RowSpan], device: torch.device) -> tuple[KVCacheStep, Tensor]:
    """The step that feeds these spans, and the index of each span's last token in it."""
    rows = torch.tensor([span.row for span in spans])
    starts = torch.tensor([span.start for span in spans])
    lengths = torch.tensor([span.stop - span.start for span in spans])
    width = int(lengths.max())
    ends = lengths.cumsum(0)
    column = torch.arange(width)
    queries = (ends - lengths)[:, None] + torch.minimum(column, (lengths - 1)[:, None])  # [V, Q]
    unpad = (column < lengths[:, None]).flatten().nonzero()[:, 0]
    positions = (starts[:, None] + column).flatten()[unpad]
    first = spans[0].row
    adjacent = [span.row for span in spans] == list(range(first, first + len(spans)))
    step = KVCacheStep(
        rows.repeat_interleave(lengths).to(device),
        positions.to(device),
        keys=max(span.stop for span in spans),
        view=slice(first, first + len(spans)) if adjacent else rows.to(device),
        queries=queries.to(device),
        unpad=unpad.to(device),
    )
    return step, (ends - 1).to(device)
