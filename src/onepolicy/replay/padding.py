"""Routes of single samples <-> routes of a padded [B, S] batch, left or right padded; and of a recorded generate().

Packed batches need neither: their trace is `RoutingTrace.concat` of the samples' traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.types import RoutingTrace, describe_argument


def pad_routes(traces: Sequence[RoutingTrace], attention_mask: Tensor) -> RoutingTrace:
    """One trace of B * S rows for a forward of `input_ids` [B, S]; row b * S + s belongs to token s of sample b.

    traces: sample b's rows, for each of its n tokens, or for all but the last: an engine never feeds the last token it
    sampled, so it has no route, and its logits predict nothing. attention_mask [B, S]: nonzero where `input_ids` is a
    token of the sample, in one run per row. Pads and last tokens without a route are valid=False: routed by the model.
    """
    _check_mask("pad_routes", attention_mask)
    if isinstance(traces, RoutingTrace | Tensor) or not isinstance(traces, Sequence):
        raise UsageError(
            f"pad_routes: traces is {type(traces).__name__}, expected a list of one trace for each sample"
        )
    starts, lengths = _runs(attention_mask)
    if not lengths:
        raise UsageError("pad_routes: attention_mask has no rows; there is nothing to lay out")
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
    if not isinstance(trace, RoutingTrace):
        raise UsageError(f"unpad_routes: trace is {type(trace).__name__}, expected a RoutingTrace")
    _check_mask("unpad_routes", attention_mask)
    samples, width = attention_mask.shape
    if len(trace) != samples * width:
        raise UsageError(
            f"unpad_routes: the trace has {len(trace)} rows, attention_mask is [{samples}, {width}]"
        )
    starts, lengths = _runs(attention_mask)
    firsts = [sample * width + start for sample, start in enumerate(starts)]
    return [
        trace.rows(first, first + tokens) for first, tokens in zip(firsts, lengths, strict=True)
    ]


def routes_of_generate(
    tape: RouteRecorder, sequences: Tensor, attention_mask: Tensor
) -> list[RoutingTrace]:
    """Return each sample's rows of a recorded `generate()`: one for each of its tokens but the last, which is not fed.

    A generate() feeds the prompts, at once or in chunks, and then one token of every sample at a time: its rows lie by
    step. sequences [B, S]: what it returned, prompts included. attention_mask: [B, P] of the prompts, as it was given,
    or [B, S] of the sequences, with 0 from where a sample ended before the others; nonzero at tokens, in one run per
    row. Lay the result out with `pad_routes`, or packed with `RoutingTrace.concat`. UsageError if the tape's forwards
    are not those of one generate() that fed each token once.
    """
    if not isinstance(tape, RouteRecorder):
        raise UsageError(
            f"routes_of_generate: tape is {type(tape).__name__}, expected what record() gave: it alone knows which "
            "rows belong to which step"
        )
    if not isinstance(sequences, Tensor) or sequences.dim() != 2:
        raise UsageError(
            f"routes_of_generate: sequences is {describe_argument(sequences)}, expected a tensor [B, S]; of "
            "return_dict_in_generate=True pass out.sequences"
        )
    _check_mask("routes_of_generate", attention_mask)
    (samples, width), forwards = sequences.shape, tape.forward_rows()
    if len(attention_mask) != samples or attention_mask.shape[1] > width:
        raise UsageError(
            f"routes_of_generate: attention_mask is {describe_argument(attention_mask)}, but sequences is [{samples}, {width}]; it "
            "has one row for each sequence (repeat a prompt's num_return_sequences times), and at most its columns"
        )
    if any(rows % samples for rows in forwards) or sum(forwards) not in (
        samples * (width - 1),
        samples * width,
    ):
        raise UsageError(
            f"routes_of_generate: the tape has {len(forwards)} forwards of {_few(forwards)} rows, but sequences is "
            f"[{samples}, {width}], of which a generate() feeds {samples} x {width - 1} tokens. Record one generate() "
            "alone, without assisted decoding"
        )
    grid, first = [], 0
    for rows in forwards:
        grid.append(first + torch.arange(rows).view(samples, -1))
        first += rows
    places = torch.cat(grid, 1)  # [B, tokens fed]
    generated = attention_mask.new_ones(samples, width - attention_mask.shape[1])
    starts, lengths = _runs(torch.cat([attention_mask, generated], 1))
    trace = tape.trace()
    rows_of = zip(places, starts, lengths, strict=True)
    return [
        trace.at(own[start : start + tokens - 1].to(trace.ids.device))
        for own, start, tokens in rows_of
    ]


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (", .." if len(numbers) > 3 else "")


def _check_mask(name: str, attention_mask: Tensor) -> None:
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        raise UsageError(
            f"{name}: attention_mask is {describe_argument(attention_mask)}, expected a tensor [B, S]"
        )


def _runs(attention_mask: Tensor) -> tuple[list[int], list[int]]:
    """Where each sample's tokens start in its row, and how many there are."""
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
    return RoutingTrace(
        ids, like.valid.new_zeros(rows), like.layers, like.num_experts, weights=weights
    )
