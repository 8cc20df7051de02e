"""Forward passes over the KV cache: decode one token of many rows, or prefill several prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.invariant.switch import is_invariant
from onepolicy.models import decode_attention
from onepolicy.models.decode_attention import KVCacheStep
from onepolicy.models.flash import fits_model
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.rollout.hf.kv_cache import KVCache

MAX_SCORES = 1 << 22  # attention scores per head of one prefill forward; bounds its memory
NO_SCORES = 1 << 62  # the bound for a flash kernel, which keeps none
MAX_TOKENS = 4096  # padded tokens of one prefill forward


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Positions [start, stop) of a cache row whose tokens are to be fed."""

    row: int
    start: int
    stop: int


class CachedForward:
    """The model together with its KV cache. It records routes if routers are given."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        routers: Routers | None,
        *,
        combine_weights: bool = False,
    ) -> None:
        self.model, self.cache, self.routers = model, cache, routers
        self._combine_weights = combine_weights
        self._recorder: RouteRecorder | None = None
        self.key_multiple = 1  # of the keys that a step reads; more with invariant operators
        model.set_attn_implementation(decode_attention.NAME)
        if routers is not None:
            cache.allocate_routes(len(routers.layers), routers.top_k, routers.num_experts)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the routes of forwards inside the context. Do nothing for a dense model."""
        if self.routers is None:
            yield
            return
        with self.routers.record(weights=self._combine_weights) as recorder:
            self._recorder = recorder
            try:
                yield
            finally:
                self._recorder = None

    def __call__(self, ids: Tensor, step: KVCacheStep, logits_at: Tensor | None = None) -> Tensor:
        """Feed ids [T] and store their keys, values and routes in the cache.

        Return float32 logits [T, V], or [n, V] of the tokens `logits_at` [n].
        """
        if self.key_multiple > 1:
            step.round_keys(self.key_multiple)
        self.cache.set_step(step)
        logits_to_keep: int | Tensor = 0  # all
        if logits_at is not None:
            logits_to_keep = logits_at
        out = self.model(
            input_ids=ids[None],
            position_ids=step.positions[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            kv_cache_step=step,
        )
        if self._recorder is not None:
            self.cache.write_routes(self._recorder.pop_ids(), self._recorder.pop_weights())
        return out.logits[0].float()

    def prefill(self, tokens: Tensor, spans: list[RowSpan]) -> Tensor:
        """Feed tokens[row, start:stop] of every span. Return logits [spans, V] of the last tokens.

        tokens: [rows, max_len].
        """
        last: dict[int, Tensor] = {}
        for chunk in prefill_chunks(spans, self._most_scores()):
            step, ends = _prefill_step(chunk, tokens.device)
            logits = self(tokens[step.rows, step.positions], step, ends)
            last |= {span.row: row for span, row in zip(chunk, logits, strict=True)}
        return torch.stack([last[span.row] for span in spans])

    def _most_scores(self) -> int:
        """Return the bound on scores of a prefill, for a kernel that keeps them."""
        if self.cache.device.type == "cpu" or is_invariant(self.model):
            return MAX_SCORES
        config = self.model.config.get_text_config()
        if fits_model(config, self.cache.device, self.cache.dtype):
            return NO_SCORES
        return MAX_SCORES


def prefill_chunks(spans: list[RowSpan], most_scores: int = MAX_SCORES) -> Iterator[list[RowSpan]]:
    """Split long spans and group short ones, so that each chunk fits one forward.

    The pieces of a row are yielded in order. most_scores: per head of a forward.
    """
    chunk: list[RowSpan] = []
    width = keys = 0
    for span in sorted(spans, key=lambda s: s.stop - s.start):
        start = span.start
        max_width = max(1, min(MAX_TOKENS, most_scores // span.stop))
        while span.stop - start > max_width:
            yield [RowSpan(span.row, start, start + max_width)]
            start += max_width
        width, keys, count = max(width, span.stop - start), max(keys, span.stop), len(chunk) + 1
        if chunk and (count * width > MAX_TOKENS or count * width * keys > most_scores):
            yield chunk
            chunk, width, keys = [], span.stop - start, span.stop
        chunk.append(RowSpan(span.row, start, span.stop))
    if chunk:
        yield chunk


def _prefill_step(spans: list[RowSpan], device: torch.device) -> tuple[KVCacheStep, Tensor]:
    """Return the step that feeds these spans, and the index of each span's last token in it."""
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
    view: slice | Tensor = rows.to(device)
    if [span.row for span in spans] == list(range(first, first + len(spans))):
        view = slice(first, first + len(spans))
    step = KVCacheStep(
        rows.repeat_interleave(lengths).to(device),
        positions.to(device),
        keys=max(span.stop for span in spans),
        view=view,
        queries=queries.to(device),
        unpad=unpad.to(device),
        bounds=torch.cat([ends.new_zeros(1), ends]).int().to(device),
        longest=width,
        stops=(starts + lengths).int().to(device),
    )
    return step, (ends - 1).to(device)
