"""Check that replayed routes belong to a forward: the public check of any trace (`windows.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.divergence.routing import routing_agreement
from onepolicy.replay.windows import (
    MIN_ROWS,
    WINDOW,
    beyond_chance,
    check_layers,
    check_samples,
    one_sample,
    refuse_sample,
)
from onepolicy.types import RoutingTrace


def check_alignment(
    replayed: RoutingTrace,
    native: RoutingTrace,
    bounds: Tensor | None = None,  # [S + 1] integer
    *,
    least: float = MIN_AGREEMENT,
    differing: Tensor | None = None,  # [T, L] uint8
) -> None:
    """Raise unless the replayed experts are mostly the routers' own choice.

    The agreement of a row is the mean fraction of a router's K replayed experts that are among the
    K experts that the router would have chosen itself. Two tests run over the rows that are valid
    in `replayed`:

    - Each layer over all rows. One wrong layer would be hidden in a mean over layers.
    - Each window of about 16 rows of a sample over all layers. One wrong sample, or a wrong part of
      a sample, would be hidden in a mean over the batch. With few layers and experts per token a
      window of right routes may be below `least` by chance: it must also be CHANCE standard errors
      below the mean of all rows.

    Args:
        replayed: the routes in question, ids [T, L, K].
        native: the routers' own choice in the same forward, from `ReplayHandle.native()` under
            `replay(trace, native=True)`.
        bounds: [S + 1], the first row of every packed sample, then T. For a padded [B, S] batch
            pass `torch.arange(B + 1) * S`. With None, windows overlap by half, because samples may
            begin anywhere, and the error cannot name a sample.
        least: the lowest agreement that passes, in [0, 1].
        differing: `router_differences(replayed, native)` where it is known already.

    Raises:
        MisalignedRoutesError: a layer or a window agrees in less than `least`. The message names
            the likely cause: a shift by one row, a moved layer axis, another layer, another sample.
        UsageError: an argument has another type or shape than this.
    """
    _check_traces(replayed, native)
    if bounds is not None:
        bounds = _check_bounds(bounds, len(replayed))
        check_samples(replayed, native, bounds, least=least, differing=differing)
        return
    rows = replayed.valid.nonzero()[:, 0]
    if len(rows) < MIN_ROWS:
        return
    agreement = routing_agreement(replayed, native, differing=differing)  # [n, L]
    check_layers(replayed, native, None, agreement.mean(0), least)
    _check_overlapping_windows(replayed, native, rows, agreement.mean(1), least)


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
    if mean[window] >= least or not beyond_chance(mean[window], agreement, WINDOW, replayed):
        return
    first, last = rows[starts[window]], rows[starts[window] + WINDOW - 1]
    where = f"rows {int(first)} to {int(last)} agree in {mean[window]:.0%}"
    refuse_sample(where, replayed, native, one_sample(replayed), 0, least)
