"""The likely cause of wrong routes: a shift, another layer, another sample, rows without a capture.

Misaligned routes are compared with the routers' own choice once more, under each assumption.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from onepolicy.divergence.routing import column_agreement, routing_agreement, signed_ids
from onepolicy.types import RoutingTrace

MIN_REPEATED = 0.8  # share of ids that are equal where the same tokens were routed twice
MIN_REPEATED_ROWS = 4
MAX_SWAP_CANDIDATES = 256  # other samples that a wrong sample is compared with
UINT8_MARK = 255


def why_surplus(ids: Tensor, rows: int) -> str:
    """Return the reason why ids [n, layers, K] have more than `rows` rows; "" if it is not known.

    verl#6029: an interrupted request returned its first rows, and once resumed all rows again.
    """
    surplus = len(ids) - rows
    for again in (surplus, surplus - 1, surplus + 1):  # with or without a row of the last token
        if surplus <= 0 or not 0 < again < len(ids):
            continue
        second = signed_ids(ids[again : 2 * again])
        same = (signed_ids(ids[: len(second)]) == second).float().mean()
        if same >= MIN_REPEATED:
            return (
                f". The rows repeat: row {again} and the next ones are row 0 and the next ones. A "
                "resumed request's routes were appended to those of its first part, although they "
                f"begin with the prompt again; keep the last {len(ids) - again} rows"
            )
    return ""


def why_wrong(trace: RoutingTrace, ids: Tensor, wrong: Tensor, outside: Tensor) -> str:
    """Return what is wrong with the first id of `wrong` [n, L]. outside: [n, L], out of range."""
    row, column = wrong.nonzero()[0].tolist()
    where = f"at layer {trace.layers[column]}, row {row}: {trace.ids[row, column].tolist()}"
    if outside[row, column]:
        return (
            f"an expert outside 0..{trace.num_experts - 1} {where}; routes of another model, "
            "physical instead of logical expert ids, or a fused shared-expert column"
        )
    return f"an expert twice {where}; {why_twice(ids, trace.valid, column)}"


def why_filler(trace: RoutingTrace) -> str:
    """Return what is wrong with routes that are 0, 1, .. K-1 in every layer and row."""
    return (
        f"every layer has the same experts {list(range(trace.top_k))} in all "
        f"{int(trace.valid.sum())} rows; the engine captured nothing (filler ids)"
    )


def why_twice(ids: Tensor, valid: Tensor, column: int) -> str:
    """Return why a row of `ids` [T, L, K] names an expert twice in the layer of this column."""
    zero = (ids[valid] == 0).all(-1)  # [n, L]
    if zero.all():
        return (
            "all rows of all layers are zero: the engine captured nothing (a fused kernel, or "
            "capture is not active)"
        )
    if zero[:, column].all():
        return (
            "all rows of this layer are zero: the engine did not capture it (a dense layer, "
            "another pipeline stage?)"
        )
    marked = int((ids[valid][:, column] == UINT8_MARK).all(-1).sum())
    if marked:
        return (
            f"{marked} of {len(zero)} rows are {UINT8_MARK} alone here. That is -1 in uint8, the "
            "mark of a row that was not captured; give valid=False for these rows"
        )
    return (
        "rows that were not captured (padding, another rank's share) must have valid=False, not "
        f"filler ids; {int(zero[:, column].sum())} of {len(zero)} rows are all zero here"
    )


def cause_of_layers(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bad: list[int],
    agreement: float,
    bounds: Tensor | None = None,
) -> tuple[str, bool]:
    """Return the likely cause, and whether the layers are wrong rather than the rows.

    bad: columns of the layers that disagree. agreement: mean of all layers. bounds: [S + 1], first
    row of every sample, then T; with it other samples are tried for the first one.
    """
    causes = [(score, cause, False) for score, cause in _row_shifts(replayed, native)]
    causes += [(score, cause, True) for score, cause in _layer_shifts(replayed, native)]
    others = list(_other_samples(replayed, native, bounds, 0)) if bounds is not None else []
    causes += [(score, f"samples were swapped: sample 0 {held}", False) for score, held in others]
    score, cause, layers_wrong = max(causes, default=(0.0, "", False))
    if _explains(score, agreement):
        return f"{cause} (agreement then: {score:.0%})", layers_wrong
    if len(bad) < len(replayed.layers) or len(replayed.layers) == 1:
        return _cause_of_one_layer(replayed, native, bad[0]), True
    return _unknown_cause("every layer is wrong", other_samples=bool(others)), False


def _row_shifts(replayed: RoutingTrace, native: RoutingTrace) -> Iterator[tuple[float, str]]:
    """Yield (agreement, cause) under the assumption that all rows are shifted by one."""
    if len(replayed) <= 1:
        return
    tail, head = slice(1, None), slice(None, -1)
    for shift, neighbour, rows, native_rows in (
        ("late", "one before", tail, head),
        ("early", "next one", head, tail),
    ):
        shifted = replayed.at(rows)
        if shifted.valid.any():
            score = float(routing_agreement(shifted, native.at(native_rows)).mean())
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
        scores = [column_agreement(replayed, native, column, column - by) for column in columns]
        layer, source = replayed.layers[1], replayed.layers[1 - by]
        cause = f"the layer axis is moved by one: layer {layer} holds those of layer {source}"
        yield sum(scores) / len(scores), cause


def _cause_of_one_layer(replayed: RoutingTrace, native: RoutingTrace, column: int) -> str:
    scores = [column_agreement(replayed, native, column, i) for i in range(len(replayed.layers))]
    best = max(range(len(scores)), key=lambda i: scores[i])
    layer = replayed.layers[column]
    if best != column and _explains(scores[best], scores[column]):
        return (
            f"layer {layer} holds the routes of layer {replayed.layers[best]} "
            f"(agreement then: {scores[best]:.0%})"
        )
    chance = replayed.top_k / replayed.num_experts
    if scores[column] > (1 + chance) / 2:
        return (
            f"layer {layer} was captured, as most of its routes show: its router has changed since "
            "it sampled, or computes something else than the engine's, or some rows were "
            "overwritten"
        )
    return (
        f"layer {layer} alone was captured wrongly: its buffer was overwritten (by a draft or "
        "multi-token-prediction layer of the same number?) or its router computes something else "
        "than the engine's"
    )


def cause_of_repeat(routes: RoutingTrace, first: int) -> str | None:
    """Return the cause if a sample's rows begin anew near row `first`; None if they do not.

    verl#6029: the routes of a resumed request, which begin with the prompt again, come after those
    of its first part, and what is too many is cut off.
    """
    ids = signed_ids(routes.ids)
    for row in range(max(1, first - 2), min(first + 3, len(ids) - MIN_REPEATED_ROWS + 1)):
        again = ids[row : 2 * row]
        if (again == ids[: len(again)]).float().mean() >= MIN_REPEATED:
            return (
                f"the rows repeat from row {row} of the sample on: a resumed request's routes were "
                "appended to those of its first part, although they begin with the prompt again; "
                "keep those of the last request alone"
            )
    return None


def cause_of_sample(
    replayed: RoutingTrace, native: RoutingTrace, bounds: Tensor, sample: int
) -> str:
    start, stop = bounds[sample : sample + 2].tolist()
    routes, own_choice = (
        replayed.at(slice(start, stop)),
        native.at(slice(start, stop)),
    )
    agreement = float(routing_agreement(routes, own_choice).mean())
    causes = [
        (score, f"in this sample {cause}") for score, cause in _row_shifts(routes, own_choice)
    ]
    others = list(_other_samples(replayed, native, bounds, sample))
    causes += [(score, f"samples were swapped: it {held}") for score, held in others]
    score, cause = max(causes, default=(0.0, ""))
    if score > agreement and _explains(score, agreement):
        return f"{cause} (agreement then: {score:.0%})"
    return _unknown_cause("these rows are wrong", other_samples=bool(others))


def _other_samples(
    replayed: RoutingTrace, native: RoutingTrace, bounds: Tensor, sample: int
) -> Iterator[tuple[float, str]]:
    """Yield (agreement, cause) under the assumption that a sample holds another one's routes."""
    start, stop = bounds[sample : sample + 2].tolist()
    for candidate in range(min(len(bounds) - 1, MAX_SWAP_CANDIDATES)):
        first, last = bounds[candidate : candidate + 2].tolist()
        length = min(stop - start, last - first)
        common = replayed.at(slice(start, start + length))
        if candidate != sample and 2 * length >= stop - start and common.valid.any():
            candidate_choice = native.at(slice(first, first + length))
            score = float(routing_agreement(common, candidate_choice).mean())
            yield score, f"holds the routes of sample {candidate}"


def _unknown_cause(finding: str, *, other_samples: bool) -> str:
    tried = "neither a shift by one row nor another layer fits"
    if other_samples:
        tried = "neither a shift by one row, nor another layer, nor another sample fits"
    return (
        f"{finding} and {tried}: "
        "routes of other weights or another model, of a re-tokenised text, physical expert ids "
        "(load balancing moves experts), or rows a prefix cache or a preempted request left "
        "behind. If the rollout's weights are meant to be that old, "
        "ask for less agreement (a run: replay.min_agreement; op.check_alignment: least)"
    )


def _explains(score: float, agreement: float) -> bool:
    """Return whether an assumption that gives agreement `score` explains half of what is missing.

    It cannot be expected to explain more. Wrong routes in lower layers have changed the hidden
    states that the upper routers choose by.
    """
    return score - agreement > 0.5 * (1 - agreement) or (score > agreement + 0.15 and score > 0.9)
