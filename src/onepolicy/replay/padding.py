"""Routes of single samples and routes of a padded batch or of a recorded `generate()`.

Packed batches need no conversion: their trace is `RoutingTrace.concat` of the samples' traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.arguments import require_tensor
from onepolicy.config import UsageError
from onepolicy.errors import describe_argument
from onepolicy.replay.contexts import RouteRecorder
from onepolicy.types import RoutingTrace, TraceOrigin


def pad_routes(traces: Sequence[RoutingTrace], attention_mask: Tensor) -> RoutingTrace:
    """Return the trace of a padded batch, from the traces of its samples.

    Args:
        traces: one trace per sample, with a row for each of its n tokens, or for all but the last.
            An engine never feeds the last token that it sampled, so that token has no route; its
            logits predict nothing.
        attention_mask: [B, S], nonzero where `input_ids` is a token of the sample, in one run per
            row. Padding may be on either side.

    Returns:
        A trace of B * S rows. Row b * S + s belongs to token s of sample b. Rows of padding and of
        a last token without a route are invalid: the model routes them itself.

    Raises:
        UsageError: a sample has another number of rows, the mask has gaps, or an argument has
            another type or shape than this.
    """
    _check_mask("pad_routes", attention_mask)
    if isinstance(traces, RoutingTrace | Tensor) or not isinstance(traces, Sequence):
        raise UsageError(
            f"pad_routes: traces is {type(traces).__name__}, expected a list of one trace for each "
            "sample"
        )
    starts, lengths = _token_runs(attention_mask)
    if not lengths:
        raise UsageError("pad_routes: attention_mask has no rows; there is nothing to lay out")
    if len(traces) != len(lengths):
        raise UsageError(f"pad_routes: {len(traces)} traces for a batch of {len(lengths)} samples")
    width, pieces = attention_mask.shape[1], []
    for sample, (trace, start, tokens) in enumerate(zip(traces, starts, lengths, strict=True)):
        _check_sample(sample, trace, tokens)
        rows = len(trace)
        pieces += [_invalid_rows(start, trace), trace, _invalid_rows(width - start - rows, trace)]
    whole = RoutingTrace.concat(pieces)
    samples = tuple(range(0, len(whole), width))
    return whole.with_origin(TraceOrigin(samples, whole.origin.steps))


def unpad_routes(trace: RoutingTrace, attention_mask: Tensor) -> list[RoutingTrace]:
    """Return each sample's rows of a padded batch's trace: the inverse of `pad_routes`.

    Args:
        trace: the trace of a recorded forward of `input_ids` [B, S], of B * S rows.
        attention_mask: [B, S], nonzero where `input_ids` is a token, in one run per row.

    Returns:
        One trace per sample, with a row for each of its tokens.

    Raises:
        UsageError: the trace has another number of rows, the mask has gaps, or an argument has
            another type or shape than this.
    """
    if not isinstance(trace, RoutingTrace):
        raise UsageError(f"unpad_routes: trace is {type(trace).__name__}, expected a RoutingTrace")
    _check_mask("unpad_routes", attention_mask)
    samples, width = attention_mask.shape
    if len(trace) != samples * width:
        raise UsageError(
            f"unpad_routes: the trace has {len(trace)} rows, attention_mask is [{samples}, {width}]"
        )
    starts, lengths = _token_runs(attention_mask)
    firsts = [sample * width + start for sample, start in enumerate(starts)]
    return [
        trace.rows(first, first + tokens) for first, tokens in zip(firsts, lengths, strict=True)
    ]


def routes_of_generate(
    tape: RouteRecorder, sequences: Tensor, attention_mask: Tensor, *, other_ranks: bool = False
) -> list[RoutingTrace]:
    """Return each sample's routes of a recorded `generate()`.

    A `generate()` feeds the prompts, at once or in chunks, and then one token of every sample at a
    time, so its rows are ordered by step. Lay the result out with `pad_routes` or, packed, with
    `RoutingTrace.concat`.

    Args:
        tape: the recording of one `generate()` that fed each token once.
        sequences: [B, S], the returned token ids, prompts included.
        attention_mask: nonzero at tokens, in one run per row. Either [B, P] of the prompts, as it
            was given to `generate()`, or [B, S] of the sequences, with 0 from where a sample ended
            before the others.
        other_ranks: leave out forwards of one token a sample after the last token, which
            `generate(synced_gpus=True)` runs until the slowest rank has ended (transformers' own
            choice under ZeRO-3 and FSDP). Drafted tokens can look like them.

    Returns:
        One trace per sample, with a row for each of its tokens but the last, which is not fed.

    Raises:
        UsageError: the recorded forwards are not those of one `generate()`, the mask has gaps, or
            an argument has another type or shape than this.
    """
    _check_generate(tape, sequences, attention_mask, other_ranks)
    samples, width = sequences.shape
    generated = attention_mask.new_ones(samples, width - attention_mask.shape[1])
    starts, lengths = _token_runs(torch.cat([attention_mask, generated], 1))
    trace = tape.trace()
    row_of_token = _rows_by_sample(tape.forward_rows(), samples).to(trace.ids.device)
    return [
        trace.at(rows[start : start + tokens - 1])
        for rows, start, tokens in zip(row_of_token, starts, lengths, strict=True)
    ]


def _rows_by_sample(forwards: Sequence[int], samples: int) -> Tensor:
    """Return the row of each token that was fed, [samples, tokens fed], of rows ordered by step.

    forwards: rows of each forward.
    """
    steps, first = [], 0
    for count in forwards:
        steps.append(first + torch.arange(count).view(samples, -1))
        first += count
    return torch.cat(steps, 1)


def _own_forwards(forwards: Sequence[int], samples: int, tokens: int) -> list[int]:
    """Return the rows of each forward, without those of one token a sample after `tokens`."""
    own: list[int] = []
    for rows in forwards:
        if sum(own) < samples * tokens or rows != samples:
            own.append(rows)
    return own


def _check_generate(
    tape: RouteRecorder, sequences: Tensor, attention_mask: Tensor, other_ranks: bool
) -> None:
    if not isinstance(tape, RouteRecorder):
        raise UsageError(
            f"routes_of_generate: tape is {type(tape).__name__}, expected the recording that "
            "record() yields: it alone knows which rows belong to which step"
        )
    if not isinstance(sequences, Tensor) or sequences.dim() != 2:
        raise UsageError(
            f"routes_of_generate: sequences is {describe_argument(sequences)}, expected a tensor "
            "[B, S]; of return_dict_in_generate=True pass out.sequences"
        )
    _check_mask("routes_of_generate", attention_mask)
    (samples, width), forwards = sequences.shape, tape.forward_rows()
    if len(attention_mask) != samples or attention_mask.shape[1] > width:
        raise UsageError(
            f"routes_of_generate: attention_mask is {describe_argument(attention_mask)}, but "
            f"sequences is [{samples}, {width}]; it has one row for each sequence (repeat a "
            "prompt's num_return_sequences times), and at most its columns"
        )
    if other_ranks:
        forwards = _own_forwards(forwards, samples, width - 1)
    # The last token of every sample may have been fed too.
    expected = samples * (width - 1), samples * width
    if any(rows % samples for rows in forwards) or sum(forwards) not in expected:
        raise UsageError(
            f"routes_of_generate: the tape has {len(forwards)} forwards of {_shortened(forwards)} "
            f"rows, but sequences is [{samples}, {width}], of which a generate() feeds {samples} x "
            f"{width - 1} tokens. Record one generate() alone, without assisted decoding; of one "
            "that waits for other ranks (synced_gpus, ZeRO-3, FSDP) pass other_ranks=True"
        )


def _shortened(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:3]))
    if len(numbers) > 3:
        text += ", .."
    return text


def _check_sample(sample: int, trace: RoutingTrace, tokens: int) -> None:
    if not isinstance(trace, RoutingTrace):
        raise UsageError(
            f"pad_routes: sample {sample} has {type(trace).__name__} in place of a RoutingTrace; "
            "for a sample without routes give rows that are not valid: "
            "RoutingTrace(ids, torch.zeros(n, dtype=torch.bool), ...)"
        )
    if len(trace) not in (tokens, tokens - 1):
        raise UsageError(
            f"pad_routes: sample {sample} has {tokens} tokens but {len(trace)} routing rows; "
            f"{tokens} tokens have {tokens - 1} rows from an engine, {tokens} from a recorded "
            "forward"
        )


def _check_mask(function: str, attention_mask: Tensor) -> None:
    require_tensor(function, "attention_mask", attention_mask)
    if attention_mask.dim() != 2 or not attention_mask.shape[1]:
        raise UsageError(
            f"{function}: attention_mask is {describe_argument(attention_mask)}, expected a "
            "tensor [B, S] of at least one token"
        )


def _token_runs(attention_mask: Tensor) -> tuple[list[int], list[int]]:
    """Return the column at which each sample's tokens start, and their number."""
    used = attention_mask != 0
    starts, lengths = used.int().argmax(1), used.sum(1)
    column = torch.arange(used.shape[1], device=used.device)
    run = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    wrong = ((run != used).any(1) | (lengths == 0)).nonzero()
    if len(wrong):
        raise UsageError(
            f"attention_mask of sample {int(wrong[0])} is not one run of tokens with padding "
            "before or after it"
        )
    return starts.tolist(), lengths.tolist()


def _invalid_rows(rows: int, like: RoutingTrace) -> RoutingTrace:
    """Return rows that the model routes itself, with the shapes of `like`."""
    ids = like.ids.new_zeros(rows, *like.ids.shape[1:])
    weights = None
    if like.weights is not None:
        weights = like.weights.new_zeros(ids.shape)
    return RoutingTrace(
        ids, like.valid.new_zeros(rows), like.layers, like.num_experts, weights=weights
    )
