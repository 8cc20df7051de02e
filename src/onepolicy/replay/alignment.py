"""Do the replayed routes belong to this forward? Compares them with what the routers would have chosen themselves.

Routes of the same tokens and weights agree but for rounding; shifted, swapped or foreign ones agree little more often
than chance. Measured shares of equal experts (`benchmarks/detector.py`, numbers in docs/replay_checks.md): clean at
least 0.97 in the worst window, misaligned at most 0.7.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.objective import MIN_AGREEMENT
from onepolicy.divergence.routing import routing_agreement
from onepolicy.replay.checks import MisalignedRoutesError, constant_layers
from onepolicy.types import RoutingTrace

WINDOW = 16  # rows looked at together
MIN_ROWS = 8  # rows of a window that say anything
MAX_SWAP_CANDIDATES = 256  # other samples a misrouted one is compared with


def check_alignment(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None = None,  # [S + 1] first row of every sample and the end; None: one sample
    *,
    least: float = MIN_AGREEMENT,
) -> None:
    """Misaligned, naming the likely cause, unless the replayed experts are mostly the routers' own choice.

    Two tests over the rows valid in `replayed`: every layer over all rows (a layer that is wrong hides in a mean over
    layers), and every window of about 16 rows of a sample over all layers (a sample, or a part of one, that is wrong
    hides in a mean over the batch). Without `bounds` the windows overlap by half, since samples may begin anywhere;
    give them to hear which sample is wrong. Agreement is the mean share of a router's K replayed experts that are among
    the K it would have chosen. `native` comes from the same forward: `replay(trace, native=True)`.
    """
    _check_traces(replayed, native)
    whole = bounds is None
    bounds = torch.tensor([0, len(replayed)]) if bounds is None else _checked(bounds, len(replayed))
    rows = replayed.valid.nonzero()[:, 0]
    if len(rows) < MIN_ROWS:
        return
    agreeing = routing_agreement(replayed, native)  # [n, L]
    layers = agreeing.mean(0)
    bad = (layers < least).nonzero()[:, 0]
    if len(bad) > 0:
        first = int(bad[0])
        where = f"layer {replayed.layers[first]} agree in {layers[first]:.0%}" + (
            f" ({len(bad)} of {len(layers)} layers are below {least:.0%})"
            if len(layers) > 1
            else ""
        )
        cause, layers_wrong = _cause_of_layers(replayed, native, bad.tolist(), float(layers.mean()))
        raise MisalignedRoutesError(_message(where, least, cause), layers_wrong=layers_wrong)
    if whole:
        _check_rows(replayed, native, rows, agreeing.mean(1), least)
        return
    starts = window_starts(bounds)
    cell = torch.searchsorted(starts, rows.cpu(), right=True) - 1
    counts = torch.bincount(cell, minlength=len(starts))
    share = torch.zeros(len(starts)).index_add(0, cell, agreeing.mean(1).cpu()) / counts
    wrong = ((share < least) & (counts >= MIN_ROWS)).nonzero()[:, 0]
    if len(wrong) > 0:
        window = int(wrong[share[wrong].argmin()])
        sample = int(torch.searchsorted(bounds, starts[window], right=True)) - 1
        row = int(starts[window] - bounds[sample])
        where = f"sample {sample} of the batch, rows {row} to {row + int(counts[window]) - 1}, agree in {share[window]:.0%}"
        raise MisalignedRoutesError(
            _message(where, least, _cause_of_sample(replayed, native, bounds, sample)),
            layers_wrong=False,
        )


def _check_rows(
    replayed: RoutingTrace, native: RoutingTrace, rows: Tensor, agreeing: Tensor, least: float
) -> None:  # [n], [n]
    """The windows where nobody knows where samples begin."""
    if len(rows) < WINDOW:
        return  # one window, and the layers were tested over it
    places = torch.arange(0, len(rows) - WINDOW + WINDOW // 2, WINDOW // 2).clamp(
        max=len(rows) - WINDOW
    )
    share = agreeing.cpu().unfold(0, WINDOW, 1).mean(1)[places]
    window = int(share.argmin())
    if share[window] < least:
        first, last = rows[places[window]], rows[places[window] + WINDOW - 1]
        where = f"rows {int(first)} to {int(last)} agree in {share[window]:.0%}"
        bounds = torch.tensor([0, len(replayed)])
        raise MisalignedRoutesError(
            _message(where, least, _cause_of_sample(replayed, native, bounds, 0)),
            layers_wrong=False,
        )


def _check_traces(replayed: RoutingTrace, native: RoutingTrace) -> None:
    for name, trace in (("replayed", replayed), ("native", native)):
        if not isinstance(trace, RoutingTrace):
            raise UsageError(
                f"check_alignment: {name} is {type(trace).__name__}, expected a RoutingTrace; `native()` of a replay "
                "gives the routers' own choice"
            )


def check_captured(
    routing: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None = None,  # [S + 1] first row of every sample and the end; None: one sample
    *,
    least: float = MIN_AGREEMENT,
) -> dict[int, list[int]]:
    """Tell a router that has collapsed from a layer that the engine did not capture: both give the same experts in
    every row of a sample. Return decoder layer -> experts of the collapsed routers.

    `native` is what the trainer's routers choose for the same tokens. A collapsed router chooses these experts there
    too. Misaligned, naming sample and layer, if the trainer agrees in less than `least`; what lies between that and
    MIN_AGREEMENT (older weights sampled, say) is neither.
    """
    bounds = torch.tensor([0, len(routing)]) if bounds is None else _checked(bounds, len(routing))
    collapsed, constant = {}, constant_layers(routing, bounds)  # [S, L]
    everywhere = constant.all(1).tolist()  # as attention over equal tokens is, collapsed or not
    for sample, column in constant.nonzero().tolist():
        rows = slice(*bounds[sample : sample + 2].tolist())
        mine, layer = _cut(routing, rows), routing.layers[column]
        experts = mine.ids[mine.valid][0, column].tolist()
        agreement = _column(mine, _cut(native, rows), column, column)
        if agreement < least:
            raise MisalignedRoutesError(
                f"layer {layer} has the same experts {experts} in all {int(mine.valid.sum())} rows of sample {sample} "
                f"of the batch, but the trainer's own router chooses them in {agreement:.0%} only: the engine did not "
                "capture this layer (a buffer written once, another rank's layer). Had the router collapsed, the "
                "trainer would choose the same",
                layers_wrong=True,
            )
        if agreement >= MIN_AGREEMENT and not everywhere[sample]:
            collapsed[layer] = experts
    return collapsed


def _checked(bounds: Tensor, rows: int) -> Tensor:  # [S + 1] int64, CPU
    good = (
        isinstance(bounds, Tensor)
        and bounds.dim() == 1
        and len(bounds) > 1
        and not bounds.is_floating_point()
    )
    if (
        not good
        or int(bounds[0]) != 0
        or int(bounds[-1]) != rows
        or bool((bounds.diff() < 0).any())
    ):
        raise UsageError(
            f"check_alignment: bounds is {bounds}, expected the first row of every sample and the end, from 0 "
            f"to {rows}, as an integer tensor; of a padded [B, S] batch torch.arange(B + 1) * S"
        )
    return bounds.cpu().long()


def window_starts(bounds: Tensor) -> Tensor:
    """bounds [S + 1] -> first row of every window, ascending: each sample in equal parts of about WINDOW rows."""
    parts = []
    for start, stop in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
        count = max(1, round((stop - start) / WINDOW))
        parts += [start + (stop - start) * i // count for i in range(count)]
    return torch.tensor(parts)


def _message(where: str, least: float, cause: str) -> str:
    return (
        f"the replayed routes are not those of this forward: replayed experts and the router's own choice at {where}, "
        f"expected at least {least:.0%} (same weights and tokens: above 95%). Likely cause: {cause}"
    )


def _cause_of_layers(
    replayed: RoutingTrace, native: RoutingTrace, bad: list[int], as_is: float
) -> tuple[str, bool]:
    """The likely cause, and whether it lies in the layers and not in the rows."""
    found = [(score, cause, False) for score, cause in _shifts(replayed, native)]
    found += [(score, cause, True) for score, cause in _layer_rolls(replayed, native)]
    score, cause, layers_wrong = max(found, default=(0.0, "", False))
    if _fits(score, as_is):
        return f"{cause} (agreement then: {score:.0%})", layers_wrong
    if len(bad) < len(replayed.layers) or len(replayed.layers) == 1:
        return _cause_of_one_layer(replayed, native, bad[0]), True
    return _unknown("every layer is wrong"), False


def _shifts(replayed: RoutingTrace, native: RoutingTrace) -> Iterator[tuple[float, str]]:
    total = len(replayed)
    for by, words in ((1, "one row late"), (-1, "one row early")):
        if total > 1:
            mine, theirs = (
                (slice(1, None), slice(None, -1)) if by > 0 else (slice(None, -1), slice(1, None))
            )
            cut = (_cut(replayed, mine), _cut(native, theirs))
            if cut[0].valid.any():
                cause = f"routes are {words}: every row holds the routes of the {'one before' if by > 0 else 'next one'}"
                yield float(routing_agreement(*cut).mean()), cause


def _layer_rolls(replayed: RoutingTrace, native: RoutingTrace) -> Iterator[tuple[float, str]]:
    count = len(replayed.layers)
    for by in (1, -1) if count > 2 else ():
        columns = range(max(by, 0), count + min(by, 0))
        scores = [_column(replayed, native, column, column - by) for column in columns]
        named = f"layer {replayed.layers[1]} holds those of layer {replayed.layers[1 - by]}"
        yield sum(scores) / len(scores), f"the layer axis is moved by one: {named}"


def _cause_of_one_layer(replayed: RoutingTrace, native: RoutingTrace, column: int) -> str:
    scores = [_column(replayed, native, column, other) for other in range(len(replayed.layers))]
    best = max(range(len(scores)), key=lambda other: scores[other])
    layer = replayed.layers[column]
    if best != column and _fits(scores[best], scores[column]):
        return f"layer {layer} holds the routes of layer {replayed.layers[best]} (agreement then: {scores[best]:.0%})"
    return (
        f"layer {layer} alone was captured wrongly: its buffer was overwritten (by a draft or multi-token-prediction "
        "layer of the same number?) or its router computes something else than the engine's"
    )


def _cause_of_sample(
    replayed: RoutingTrace, native: RoutingTrace, bounds: Tensor, sample: int
) -> str:
    start, stop = bounds[sample : sample + 2].tolist()
    mine = _cut(replayed, slice(start, stop))
    as_is = float(routing_agreement(mine, _cut(native, slice(start, stop))).mean())
    found = [
        (score, f"in this sample {cause}")
        for score, cause in _shifts(mine, _cut(native, slice(start, stop)))
    ]
    for other in range(min(len(bounds) - 1, MAX_SWAP_CANDIDATES)):
        first, last = bounds[other : other + 2].tolist()
        length = min(stop - start, last - first)
        ours = _cut(mine, slice(0, length))
        if other != sample and 2 * length >= stop - start and ours.valid.any():
            score = float(
                routing_agreement(ours, _cut(native, slice(first, first + length))).mean()
            )
            found.append((score, f"samples were swapped: it holds the routes of sample {other}"))
    score, cause = max(found, default=(0.0, ""))
    if score > as_is and _fits(score, as_is):
        return f"{cause} (agreement then: {score:.0%})"
    return _unknown("these rows are wrong")


def _unknown(what: str) -> str:
    return (
        f"{what} and neither a shift by one row, nor another layer, nor another sample fits: routes of other weights "
        "or another model, of a re-tokenised text, or rows a prefix cache or a preempted request left behind. If the "
        "rollout's weights are meant to be that old, ask for less agreement (`least`)"
    )


def _fits(score: float, as_is: float) -> bool:
    """Does a hypothesis explain half of what is missing? More cannot be asked: wrong routes in the layers below have
    moved what the layers above would choose."""
    return score - as_is > 0.5 * (1 - as_is) or (score > as_is + 0.15 and score > 0.9)


def _column(replayed: RoutingTrace, native: RoutingTrace, column: int, other: int) -> float:
    mine = RoutingTrace(replayed.ids[:, [column]], replayed.valid, (0,), replayed.num_experts)
    theirs = RoutingTrace(native.ids[:, [other]], native.valid, (0,), native.num_experts)
    return float(routing_agreement(mine, theirs).mean())


def _cut(trace: RoutingTrace, rows: slice) -> RoutingTrace:
    return RoutingTrace(trace.ids[rows], trace.valid[rows], trace.layers, trace.num_experts)
