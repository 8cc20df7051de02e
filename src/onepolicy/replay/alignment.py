"""Check that replayed routes belong to a forward, by comparing them with the routers' own choice.

Routes of the same tokens and weights differ by rounding only. Routes that are shifted, swapped or
of other weights agree little more often than chance. Measured agreement (`benchmarks/detector.py`,
numbers in docs/replay_checks.md): at least 0.97 in the worst window of clean routes, at most 0.7 in
misaligned ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.divergence.routing import routing_agreement
from onepolicy.replay.checks import MisalignedRoutesError, constant_layers
from onepolicy.types import RoutingTrace, index_ids

WINDOW = 16  # rows per window
MIN_ROWS = 8  # a window with fewer valid rows is not tested
MAX_SWAP_CANDIDATES = 256  # other samples that a wrong sample is compared with


def check_alignment(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None = None,  # [S + 1] integer
    *,
    least: float = MIN_AGREEMENT,
) -> None:
    """Raise unless the replayed experts are mostly the routers' own choice.

    The agreement of a row is the mean fraction of a router's K replayed experts that are among the
    K experts that the router would have chosen itself. Two tests run over the rows that are valid
    in `replayed`:

    - Each layer over all rows. One wrong layer would be hidden in a mean over layers.
    - Each window of about 16 rows of a sample over all layers. One wrong sample, or a wrong part of
      a sample, would be hidden in a mean over the batch.

    Args:
        replayed: the routes in question, ids [T, L, K].
        native: the routers' own choice in the same forward, from `ReplayHandle.native()` under
            `replay(trace, native=True)`.
        bounds: [S + 1], the first row of every packed sample, then T. For a padded [B, S] batch
            pass `torch.arange(B + 1) * S`. With None, windows overlap by half, because samples may
            begin anywhere, and the error cannot name a sample.
        least: the lowest agreement that passes, in [0, 1].

    Raises:
        MisalignedRoutesError: a layer or a window agrees in less than `least`. The message names
            the likely cause: a shift by one row, a moved layer axis, another layer, another sample.
        UsageError: an argument has another type or shape than this.
    """
    _check_traces(replayed, native)
    if bounds is not None:
        bounds = _check_bounds(bounds, len(replayed))
    rows = replayed.valid.nonzero()[:, 0]
    if len(rows) < MIN_ROWS:
        return
    agreement = routing_agreement(replayed, native)  # [n, L]
    _check_layers(replayed, native, agreement.mean(0), least)
    if bounds is None:
        _check_overlapping_windows(replayed, native, rows, agreement.mean(1), least)
    else:
        _check_windows_of_samples(replayed, native, bounds, rows, agreement.mean(1), least)


def check_captured(
    routing: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None = None,  # [S + 1] integer
    *,
    least: float = MIN_AGREEMENT,
) -> dict[int, list[int]]:
    """Tell a collapsed router from a layer that the engine did not capture.

    Both give the same experts in every row of a sample. But a collapsed router chooses these
    experts in the trainer too, and for a layer that was not captured the trainer's choice differs.

    Args:
        routing: the engine's routes, ids [T, L, K].
        native: the trainer's own choice for the same tokens.
        bounds: [S + 1], the first row of every packed sample, then T; None for one sample.
        least: the lowest agreement that passes. A layer whose agreement is at least this, but below
            MIN_AGREEMENT, counts as neither (older weights may have sampled).

    Returns:
        Decoder layer -> its experts, for every router that has collapsed.

    Raises:
        MisalignedRoutesError: the trainer agrees in less than `least`. The message names the sample
            and the layer.
        UsageError: `bounds` is not as described.
    """
    bounds = _one_sample(routing) if bounds is None else _check_bounds(bounds, len(routing))
    collapsed = {}
    constant = constant_layers(routing, bounds)  # [S, L]
    # Attention over equal tokens gives constant routes in all layers, whether a router collapsed
    # or not.
    constant_everywhere = constant.all(1).tolist()
    for sample, column in constant.nonzero().tolist():
        rows = slice(*bounds[sample : sample + 2].tolist())
        layer, captured = routing.layers[column], _cut_rows(routing, rows)
        experts = index_ids(captured.ids, captured.valid)[0, column].tolist()
        agreement = _column_agreement(captured, _cut_rows(native, rows), column, column)
        if agreement < least:
            where = f"in all {int(captured.valid.sum())} rows of sample {sample} of the batch"
            raise MisalignedRoutesError(
                f"layer {layer} has the same experts {experts} {where}, but the trainer's own "
                f"router chooses them in {agreement:.0%} only: the engine did not capture this "
                "layer (a buffer written once, another rank's layer). Had the router collapsed, "
                "the trainer would choose the same",
                layers_wrong=True,
            )
        if agreement >= MIN_AGREEMENT and not constant_everywhere[sample]:
            collapsed[layer] = experts
    return collapsed


def window_starts(bounds: Tensor) -> Tensor:
    """Return the first row of every window, ascending, for samples that begin at `bounds` [S + 1].

    Each sample is cut into equal parts of about WINDOW rows.
    """
    starts = []
    for start, stop in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
        count = max(1, round((stop - start) / WINDOW))
        starts += [start + (stop - start) * i // count for i in range(count)]
    return torch.tensor(starts)


def _check_traces(replayed: RoutingTrace, native: RoutingTrace) -> None:
    for name, trace in (("replayed", replayed), ("native", native)):
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"check_alignment: {name} is {type(trace).__name__}, expected a RoutingTrace; "
                "`native()` of a replay gives the routers' own choice"
            )


def _check_bounds(bounds: Tensor, rows: int) -> Tensor:
    """Return `bounds` as [S + 1] int64 on the CPU.

    Raise UsageError unless they are integers that ascend from 0 to `rows`.
    """
    is_vector = isinstance(bounds, Tensor) and bounds.dim() == 1 and len(bounds) > 1
    if (
        not is_vector
        or bounds.is_floating_point()
        or int(bounds[0]) != 0
        or int(bounds[-1]) != rows
        or bool((bounds.diff() < 0).any())
    ):
        raise UsageError(
            f"check_alignment: bounds is {bounds}, expected the first row of every sample and the "
            f"end, from 0 to {rows}, as an integer tensor; of a padded [B, S] batch "
            "torch.arange(B + 1) * S"
        )
    return bounds.cpu().long()


def _one_sample(trace: RoutingTrace) -> Tensor:
    return torch.tensor([0, len(trace)])


def _check_layers(
    replayed: RoutingTrace, native: RoutingTrace, agreement: Tensor, least: float
) -> None:
    """Raise if a layer's `agreement` [L] over all rows is below `least`."""
    bad = (agreement < least).nonzero()[:, 0]
    if len(bad) == 0:
        return
    first = int(bad[0])
    where = f"layer {replayed.layers[first]} agree in {agreement[first]:.0%}"
    if len(agreement) > 1:
        where += f" ({len(bad)} of {len(agreement)} layers are below {least:.0%})"
    cause, layers_wrong = _cause_of_layers(replayed, native, bad.tolist(), float(agreement.mean()))
    raise MisalignedRoutesError(_message(where, least, cause), layers_wrong=layers_wrong)


def _check_overlapping_windows(
    replayed: RoutingTrace, native: RoutingTrace, rows: Tensor, agreement: Tensor, least: float
) -> None:
    """Raise if a window of rows that overlap by half agrees in less than `least`.

    rows [n]: the valid rows. agreement [n]: of each of them.
    """
    if len(rows) < WINDOW:
        return  # it would be one window, and the test of the layers covered these rows
    last_start = len(rows) - WINDOW
    starts = torch.arange(0, last_start + WINDOW // 2, WINDOW // 2).clamp(max=last_start)
    mean = agreement.cpu().unfold(0, WINDOW, 1).mean(1)[starts]
    window = int(mean.argmin())
    if mean[window] >= least:
        return
    first, last = rows[starts[window]], rows[starts[window] + WINDOW - 1]
    where = f"rows {int(first)} to {int(last)} agree in {mean[window]:.0%}"
    cause = _cause_of_sample(replayed, native, _one_sample(replayed), 0)
    raise MisalignedRoutesError(_message(where, least, cause), layers_wrong=False)


def _check_windows_of_samples(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor,
    rows: Tensor,
    agreement: Tensor,
    least: float,
) -> None:
    """Raise if a window of a sample agrees in less than `least`.

    bounds [S + 1]: first row of every sample. rows [n]: the valid rows. agreement [n]: of each.
    """
    starts = window_starts(bounds)
    window_of_row = torch.searchsorted(starts, rows.cpu(), right=True) - 1
    counts = torch.bincount(window_of_row, minlength=len(starts))
    mean = torch.zeros(len(starts)).index_add(0, window_of_row, agreement.cpu()) / counts
    wrong = ((mean < least) & (counts >= MIN_ROWS)).nonzero()[:, 0]
    if len(wrong) == 0:
        return
    window = int(wrong[mean[wrong].argmin()])
    sample = int(torch.searchsorted(bounds, starts[window], right=True)) - 1
    row = int(starts[window] - bounds[sample])
    last = row + int(counts[window]) - 1
    where = f"sample {sample} of the batch, rows {row} to {last}, agree in {mean[window]:.0%}"
    cause = _cause_of_sample(replayed, native, bounds, sample)
    raise MisalignedRoutesError(_message(where, least, cause), layers_wrong=False)


def _message(where: str, least: float, cause: str) -> str:
    return (
        "the replayed routes are not those of this forward: replayed experts and the router's own "
        f"choice at {where}, expected at least {least:.0%} (same weights and tokens: above 95%). "
        f"Likely cause: {cause}"
    )


def _cause_of_layers(
    replayed: RoutingTrace, native: RoutingTrace, bad: list[int], agreement: float
) -> tuple[str, bool]:
    """Return the likely cause, and whether the layers are wrong rather than the rows.

    bad: columns of the layers that disagree. agreement: mean of all layers.
    """
    causes = [(score, cause, False) for score, cause in _row_shifts(replayed, native)]
    causes += [(score, cause, True) for score, cause in _layer_shifts(replayed, native)]
    score, cause, layers_wrong = max(causes, default=(0.0, "", False))
    if _explains(score, agreement):
        return f"{cause} (agreement then: {score:.0%})", layers_wrong
    if len(bad) < len(replayed.layers) or len(replayed.layers) == 1:
        return _cause_of_one_layer(replayed, native, bad[0]), True
    return _unknown_cause("every layer is wrong"), False


def _row_shifts(replayed: RoutingTrace, native: RoutingTrace) -> Iterator[tuple[float, str]]:
    """Yield (agreement, cause) under the assumption that all rows are shifted by one."""
    if len(replayed) <= 1:
        return
    tail, head = slice(1, None), slice(None, -1)
    for shift, neighbour, rows, native_rows in (
        ("late", "one before", tail, head),
        ("early", "next one", head, tail),
    ):
        shifted = _cut_rows(replayed, rows)
        if shifted.valid.any():
            score = float(routing_agreement(shifted, _cut_rows(native, native_rows)).mean())
            yield (
                score,
                f"routes are one row {shift}: every row holds the routes of the {neighbour}",
            )


def _layer_shifts(replayed: RoutingTrace, native: RoutingTrace) -> Iterator[tuple[float, str]]:
    """Yield (agreement, cause) under the assumption that the layer axis is shifted by one."""
    count = len(replayed.layers)
    if count <= 2:
        return
    for by in (1, -1):
        columns = range(max(by, 0), count + min(by, 0))
        scores = [_column_agreement(replayed, native, column, column - by) for column in columns]
        layer, source = replayed.layers[1], replayed.layers[1 - by]
        cause = f"the layer axis is moved by one: layer {layer} holds those of layer {source}"
        yield sum(scores) / len(scores), cause


def _cause_of_one_layer(replayed: RoutingTrace, native: RoutingTrace, column: int) -> str:
    scores = [_column_agreement(replayed, native, column, i) for i in range(len(replayed.layers))]
    best = max(range(len(scores)), key=lambda i: scores[i])
    layer = replayed.layers[column]
    if best != column and _explains(scores[best], scores[column]):
        return (
            f"layer {layer} holds the routes of layer {replayed.layers[best]} "
            f"(agreement then: {scores[best]:.0%})"
        )
    return (
        f"layer {layer} alone was captured wrongly: its buffer was overwritten (by a draft or "
        "multi-token-prediction layer of the same number?) or its router computes something else "
        "than the engine's"
    )


def _cause_of_sample(
    replayed: RoutingTrace, native: RoutingTrace, bounds: Tensor, sample: int
) -> str:
    start, stop = bounds[sample : sample + 2].tolist()
    routes, own_choice = (
        _cut_rows(replayed, slice(start, stop)),
        _cut_rows(native, slice(start, stop)),
    )
    agreement = float(routing_agreement(routes, own_choice).mean())
    causes = [
        (score, f"in this sample {cause}") for score, cause in _row_shifts(routes, own_choice)
    ]
    for candidate in range(min(len(bounds) - 1, MAX_SWAP_CANDIDATES)):
        first, last = bounds[candidate : candidate + 2].tolist()
        length = min(stop - start, last - first)
        common = _cut_rows(routes, slice(0, length))
        if candidate != sample and 2 * length >= stop - start and common.valid.any():
            candidate_choice = _cut_rows(native, slice(first, first + length))
            score = float(routing_agreement(common, candidate_choice).mean())
            cause = f"samples were swapped: it holds the routes of sample {candidate}"
            causes.append((score, cause))
    score, cause = max(causes, default=(0.0, ""))
    if score > agreement and _explains(score, agreement):
        return f"{cause} (agreement then: {score:.0%})"
    return _unknown_cause("these rows are wrong")


def _unknown_cause(finding: str) -> str:
    return (
        f"{finding} and neither a shift by one row, nor another layer, nor another sample fits: "
        "routes of other weights or another model, of a re-tokenised text, or rows a prefix cache "
        "or a preempted request left behind. If the rollout's weights are meant to be that old, "
        "ask for less agreement (`least`)"
    )


def _explains(score: float, agreement: float) -> bool:
    """Return whether an assumption that gives agreement `score` explains half of what is missing.

    It cannot be expected to explain more. Wrong routes in lower layers have changed the hidden
    states that the upper routers choose by.
    """
    return score - agreement > 0.5 * (1 - agreement) or (score > agreement + 0.15 and score > 0.9)


def _column_agreement(
    replayed: RoutingTrace, native: RoutingTrace, column: int, native_column: int
) -> float:
    """Return the mean agreement of one layer's replayed routes with a layer's native routes."""
    routes = RoutingTrace(
        replayed.ids[:, column : column + 1], replayed.valid, (0,), replayed.num_experts
    )
    own_choice = RoutingTrace(
        native.ids[:, native_column : native_column + 1], native.valid, (0,), native.num_experts
    )
    return float(routing_agreement(routes, own_choice).mean())


def _cut_rows(trace: RoutingTrace, rows: slice) -> RoutingTrace:
    return RoutingTrace(trace.ids[rows], trace.valid[rows], trace.layers, trace.num_experts)
