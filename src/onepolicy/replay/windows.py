"""The comparison of replayed routes with the routers' own choice, by layer and by window of rows.

Routes of the same tokens and weights differ by rounding only. Routes that are shifted, swapped or
of other weights agree little more often than chance. Measured agreement (`benchmarks/detector.py`,
numbers in docs/replay.md): at least 0.97 in the worst window of clean routes, at most 0.7 in
misaligned ones.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.divergence.routing import column_agreement, routing_agreement
from onepolicy.replay.checks import MisalignedRoutesError, constant_layers
from onepolicy.replay.evidence import new_rows
from onepolicy.replay.misalignment import cause_of_layers, cause_of_sample
from onepolicy.types import RoutingTrace, index_ids

WINDOW = 16  # rows per window
MIN_ROWS = 8  # a window with fewer valid rows is not tested
CHANCE = 5.0  # standard errors by which a window of few routers may miss `least` by chance


def check_samples(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor,  # [S + 1] integer, first row of every sample, then T
    *,
    least: float,
    differing: Tensor | None = None,  # [T, L] uint8
) -> None:
    """Raise as `alignment.check_alignment` for routes of packed samples, which are known to fit."""
    rows = replayed.valid.nonzero()[:, 0]
    if len(rows) < MIN_ROWS:
        return
    bounds = bounds.cpu().long()
    agreement = routing_agreement(replayed, native, differing=differing)  # [n, L]
    check_layers(replayed, native, bounds, agreement.mean(0), least)
    _check_windows(replayed, native, bounds, rows, agreement.mean(1), least)


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
    In a text of few tokens, over and over, it may also be a near tie, if other layers agree.

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
    """
    bounds = one_sample(routing) if bounds is None else bounds.cpu().long()
    collapsed = {}
    constant = constant_layers(routing, bounds)  # [S, L]
    # Attention over equal tokens gives constant routes in all layers, whether a router collapsed
    # or not.
    constant_everywhere = constant.all(1).tolist()
    for sample, column in constant.nonzero().tolist():
        rows = slice(*bounds[sample : sample + 2].tolist())
        layer, captured = routing.layers[column], routing.at(rows)
        experts = index_ids(captured.ids, captured.valid)[0, column].tolist()
        agreement = column_agreement(captured, native.at(rows), column, column)
        near_tie = (
            agreement < least and _repeats(captured) and not _all_differ(captured, native.at(rows))
        )
        if agreement < least and not near_tie:
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


def _repeats(captured: RoutingTrace) -> bool:
    return not bool(new_rows(captured, one_sample(captured)).all())


def _all_differ(captured: RoutingTrace, native: RoutingTrace) -> bool:
    """Return whether all layers of a sample differ. A near tie is a matter of one or two."""
    return float(routing_agreement(captured, native).mean()) < 0.25


def window_starts(bounds: Tensor) -> Tensor:
    """Return the first row of every window, ascending, for samples that begin at `bounds` [S + 1].

    Each sample is cut into equal parts of about WINDOW rows.
    """
    starts = []
    for start, stop in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
        count = max(1, round((stop - start) / WINDOW))
        starts += [start + (stop - start) * i // count for i in range(count)]
    return torch.tensor(starts)


def one_sample(trace: RoutingTrace) -> Tensor:
    return torch.tensor([0, len(trace)])


def check_layers(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None,
    agreement: Tensor,
    least: float,
) -> None:
    """Raise if a layer's `agreement` [L] over all rows is below `least`."""
    bad = (agreement < least).nonzero()[:, 0]
    if len(bad) == 0:
        return
    first = int(bad[0])
    where = f"layer {replayed.layers[first]} agree in {agreement[first]:.0%}"
    if len(agreement) > 1:
        where += f" ({len(bad)} of {len(agreement)} layers are below {least:.0%})"
    overall = float(agreement.mean())
    cause, layers_wrong = cause_of_layers(replayed, native, bad.tolist(), overall, bounds)
    raise MisalignedRoutesError(message(where, least, cause), layers_wrong=layers_wrong)


def _check_windows(
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
    wrong = (mean < least) & (counts >= MIN_ROWS)
    wrong = (wrong & beyond_chance(mean, agreement, counts, replayed)).nonzero()[:, 0]
    if len(wrong) == 0:
        return
    window = int(wrong[mean[wrong].argmin()])
    sample = int(torch.searchsorted(bounds, starts[window], right=True)) - 1
    row = int(starts[window] - bounds[sample])
    last = row + int(counts[window]) - 1
    where = f"sample {sample} of the batch, rows {row} to {last}, agree in {mean[window]:.0%}"
    refuse_sample(where, replayed, native, bounds, sample, least)


def beyond_chance(
    mean: Tensor, agreement: Tensor, rows: Tensor | int, trace: RoutingTrace
) -> Tensor:
    """Return whether windows of `rows` rows with this mean are too low for the mean of all rows.

    The standard error is that of independent experts. agreement [n]: of every row.
    """
    expected = agreement.mean().cpu()
    experts = rows * len(trace.layers) * trace.ids.shape[2]
    return expected - mean > CHANCE * (expected * (1 - expected) / experts).sqrt()


def refuse_sample(
    where: str,
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor,
    sample: int,
    least: float,
) -> NoReturn:
    """Raise for a window of this sample. bounds [S + 1]: first row of every sample."""
    cause = cause_of_sample(replayed, native, bounds, sample)
    raise MisalignedRoutesError(message(where, least, cause), layers_wrong=False)


def message(where: str, least: float, cause: str) -> str:
    """Return an error's text: where the routes do not agree, and the likely cause."""
    return (
        "the replayed routes are not those of this forward: replayed experts and the router's own "
        f"choice at {where}, expected at least {least:.0%} (same weights and tokens: above 95%). "
        f"Likely cause: {cause}"
    )
