"""Routes in the layouts in which trainers feed their models.

Padded batches have `onepolicy.pad_routes`. The functions here are for packed rows with padding at
the end, for the part of the tokens that a rank of context parallelism has, and for models that take
the sequence first. A test of a new layout lets the trainer's own function lay out positions and
compares (`tests/unit/integrations/test_layout.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import RoutingTrace


def fit(trace: RoutingTrace, rows: int) -> RoutingTrace:
    """Return the trace with `rows` rows: cut at the end, or with invalid rows appended.

    The model routes invalid rows itself.

    Raises:
        UsageError: `rows` is negative.
    """
    if rows < 0:
        raise UsageError(f"fit: rows is {rows}, expected 0 or more")
    missing = rows - len(trace)
    if missing <= 0:
        return trace.rows(0, rows)
    ids = torch.cat([trace.ids, trace.ids.new_zeros(missing, *trace.ids.shape[1:])])
    valid = torch.cat([trace.valid, trace.valid.new_zeros(missing)])
    weights = None
    if trace.weights is not None:
        shape = missing, *trace.weights.shape[1:]
        weights = torch.cat([trace.weights, trace.weights.new_zeros(shape)])
    fitted = dataclasses.replace(trace, ids=ids, valid=valid, weights=weights)
    return fitted.with_origin(trace.origin)


def sample_starts(args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> tuple[int, ...]:
    """Return the first row of each sample of a forward, by the arguments that it is given.

    A batch of one row is packed if it has `position_ids`: samples begin where they are 0. Anything
    that is not known counts as one sample.

    Args:
        args, kwargs: of a transformers model's forward.
        rows: B * S, its tokens.
    """
    tokens, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    if tokens is None and args:
        tokens = args[0]
    if isinstance(tokens, Tensor) and tokens.dim() > 1 and len(tokens) > 1:
        return tuple(range(0, rows, rows // len(tokens)))
    starts: list[int] = []
    if isinstance(positions, Tensor) and positions.numel() == rows:
        starts = (positions.reshape(-1) == 0).nonzero()[:, 0].tolist()
    return tuple(sorted({0, *starts}))


def packed(
    traces: Sequence[RoutingTrace], lengths: Sequence[int], rows: int | None = None
) -> RoutingTrace:
    """Return the trace of samples that lie one after the other in one row.

    Args:
        traces: one trace per sample. A sample of n tokens may have a route for each token, or for
            all but the last.
        lengths: tokens of each sample.
        rows: tokens of the packed row. Those after the samples are padding (a bucket, a multiple of
            the ranks, fp8 alignment). None: no padding.

    Raises:
        UsageError: a trace has another number of rows than its sample, or `rows` is too small.
    """
    if len(traces) != len(lengths):
        raise UsageError(f"packed: {len(traces)} traces for {len(lengths)} samples")
    for sample, (trace, tokens) in enumerate(zip(traces, lengths, strict=True)):
        if len(trace) not in (tokens, tokens - 1):
            raise UsageError(
                f"packed: sample {sample} has {tokens} tokens but {len(trace)} routing rows; cut "
                "or extend them with fit(trace, tokens)"
            )
    whole = RoutingTrace.concat([fit(t, n) for t, n in zip(traces, lengths, strict=True)])
    if rows is None:
        return whole
    if rows < len(whole):
        raise UsageError(f"packed: {len(whole)} tokens do not fit into rows={rows}")
    return fit(whole, rows)


def contiguous_slice(trace: RoutingTrace, rank: int, ranks: int) -> RoutingTrace:
    """Return the rows of one rank, where every rank has an equal run of the padded tokens.

    Ulysses and prime-rl's context parallelism slice so.

    Raises:
        UsageError: the rows cannot be split equally, or there is no such rank.
    """
    _check_rank("contiguous_slice", rank, ranks)
    if len(trace) % ranks:
        raise UsageError(
            f"contiguous_slice: {len(trace)} rows cannot be split over {ranks} ranks; pad them "
            f"first, with fit(trace, {len(trace) + -len(trace) % ranks})"
        )
    size = len(trace) // ranks
    return trace.rows(rank * size, (rank + 1) * size)


def zigzag_rows(lengths: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Return the rows [n] int64 of one rank of Megatron's context parallelism, for `trace.at`.

    Each sample is split into 2 * ranks chunks. Rank r has chunks r and 2 * ranks - 1 - r, so that
    all ranks have the same share of the causal attention. Megatron-core, slime, miles and SkyRL
    split so.

    Args:
        lengths: tokens of each packed sample, padding included.
        rank, ranks: of the context-parallel group.

    Raises:
        UsageError: a length is no multiple of 2 * ranks, or there is no such rank.
    """
    _check_rank("zigzag_rows", rank, ranks)
    rows, start = [], 0
    for sample, length in enumerate(lengths):
        chunk, rest = divmod(length, 2 * ranks)
        if rest:
            raise UsageError(
                f"zigzag_rows: sample {sample} has {length} tokens, no multiple of 2 x {ranks} "
                "ranks; pad it first"
            )
        for number in (rank, 2 * ranks - 1 - rank):
            first = start + number * chunk
            rows.append(torch.arange(first, first + chunk))
        start += length
    if not rows:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat(rows)


def sequence_first(trace: RoutingTrace, samples: int) -> RoutingTrace:
    """Return the rows [S * B] of a model that takes [S, B] tokens, from rows [B * S].

    Megatron's models take the sequence first.

    Raises:
        UsageError: the rows are not those of `samples` samples of one length.
    """
    if samples < 1 or len(trace) % samples:
        raise UsageError(f"sequence_first: {len(trace)} rows are not those of {samples} samples")
    rows = torch.arange(len(trace), device=trace.ids.device)
    return trace.at(rows.view(samples, -1).T.reshape(-1))


def _check_rank(function: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise UsageError(f"{function}: rank is {rank}, expected 0 to {ranks - 1}")
