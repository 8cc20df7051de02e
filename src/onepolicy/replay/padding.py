"""Routes of single samples <-> routes of a padded [B, S] batch, left or right padded.

Packed batches need neither: their trace is `RoutingTrace.concat` of the samples' traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import RoutingTrace


def pad_routes(traces: Sequence[RoutingTrace], attention_mask: Tensor) -> RoutingTrace:
    """One trace of B * S rows for a forward of `input_ids` [B, S]; row b * S + s belongs to token s of sample b.

    traces: sample b's rows, for each of its n tokens, or for all but the last: an engine never feeds the last token it
    sampled, so it has no route, and its logits predict nothing. attention_mask [B, S]: nonzero where `input_ids` is a
    token of the sample, in one run per row. Pads and last tokens without a route are valid=False: routed by the model.
    """
    starts, lengths = _runs(attention_mask)
    if len(traces) != len(lengths):
        raise UsageError(f"pad_routes: {len(traces)} traces for a batch of {len(lengths)} samples")
    width, pieces = attention_mask.shape[1], []
    for sample, (trace, start, tokens) in enumerate(zip(traces, starts, lengths, strict=True)):
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"pad_routes: sample {sample} has {type(trace).__name__} in place of a RoutingTrace; for a sample "
                "without routes give rows that are not valid: RoutingTrace(ids, torch.zeros(n, dtype=torch.bool), ...)"
            )
        rows = len(trace)
        if rows not in (tokens, tokens - 1):
            raise UsageError(
                f"pad_routes: sample {sample} has {tokens} tokens but {rows} routing rows; {tokens} tokens have "
                f"{tokens - 1} rows from an engine, {tokens} from a recorded forward"
            )
        pieces += [_native(start, trace), trace, _native(width - start - rows, trace)]
    return RoutingTrace.concat(pieces)


def unpad_routes(trace: RoutingTrace, attention_mask: Tensor) -> list[RoutingTrace]:
    """The inverse, of a recorded forward: each sample's rows, one for each of its tokens. attention_mask [B, S]."""
    samples, width = attention_mask.shape
    if len(trace) != samples * width:
        raise UsageError(f"unpad_routes: the trace has {len(trace)} rows, attention_mask is [{samples}, {width}]")
    starts, lengths = _runs(attention_mask)
    firsts = [sample * width + start for sample, start in enumerate(starts)]
    return [trace.rows(first, first + tokens) for first, tokens in zip(firsts, lengths, strict=True)]


def _runs(attention_mask: Tensor) -> tuple[list[int], list[int]]:
    """Where each sample's tokens start in its row, and how many there are."""
    if attention_mask.dim() != 2:
        raise UsageError(f"attention_mask has shape {tuple(attention_mask.shape)}, expected [B, S]")
    used = attention_mask != 0
    starts, lengths = used.int().argmax(1), used.sum(1)
    column = torch.arange(used.shape[1], device=used.device)
    run = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    wrong = ((run != used).any(1) | (lengths == 0)).nonzero()
    if len(wrong):
        raise UsageError(
            f"attention_mask of sample {int(wrong[0])} is not one run of tokens with padding before or after it"
        )
    return starts.tolist(), lengths.tolist()


def _native(rows: int, like: RoutingTrace) -> RoutingTrace:
    """Rows that the model routes itself."""
    ids = like.ids.new_zeros(rows, *like.ids.shape[1:])
    weights = None if like.weights is None else like.weights.new_zeros(ids.shape)
    return RoutingTrace(ids, like.valid.new_zeros(rows), like.layers, like.num_experts, weights=weights)
