"""Statistics of a correction: sums that add up over micro-batches and ranks, and named numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from onepolicy.config.correction import CorrectionConfig
from onepolicy.errors import UsageError

QUANTILES = (0.01, 0.5, 0.99)
SMALLEST, GROWTH = 1e-6, 1.02
"""|log rho| below SMALLEST counts as 0; a bin is 2% wide in |log rho|, so a quantile of log rho is
within 1%.
"""
BINS_PER_SIGN = math.ceil(math.log(80.0 / SMALLEST) / math.log(GROWTH)) + 1
BINS = 2 * BINS_PER_SIGN + 1


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over slots, which `combine` adds up.

    Any split of a batch gives the sums of the whole. Scalars are float64 tensors.
    """

    slots: Tensor  # number of trainable slots, before any rejection
    kept: Tensor
    nonfinite: Tensor  # slots whose ratio is not finite
    rejected: Tensor  # [G] slots rejected by each gate alone; last by the weight's bounds, if any
    weighted: Tensor  # kept slots whose weight is not 1
    clipped: Tensor  # kept slots whose weight was moved to a bound
    ratio: Tensor  # sum of rho over finite slots
    ratio_square: Tensor
    weight: Tensor  # sum of weights, rejected slots as 0
    weight_square: Tensor
    mass: Tensor  # number of units that the loss averages over: 1 a slot, or 1 / T_i for sequences
    kept_mass: Tensor
    weight_mass: Tensor  # sum of the weights that `normalise` makes 1 in the mean
    ratio_counts: Tensor  # [BINS] int64 histogram of log rho
    weight_counts: Tensor  # [BINS] int64 histogram of the log of the kept slots' weights
    ratio_max: Tensor
    weight_max: Tensor
    weight_min: Tensor  # of kept slots

    def scale(self, config: CorrectionConfig) -> Tensor:
        """Return the factor on all weights, a scalar; 1 if no slot is kept."""
        if config.normalise != "none":
            part = self.weight_mass
        elif config.denominator == "kept":
            part = self.kept_mass
        else:
            return torch.ones_like(self.mass)
        return torch.where(part > 0, self.mass / part, 1.0)


_NAMES = tuple(field.name for field in fields(Sums))


def combine(parts: Iterable[Sums]) -> Sums:
    """Return the sums of the whole from those of its parts (micro-batches, ranks).

    Raises UsageError if there are no parts.
    """
    if not isinstance(parts, Iterable) or isinstance(parts, Tensor):
        raise UsageError(f"combine: parts is {type(parts).__name__}, expected several `sums`")
    parts = list(parts)
    if not parts or not all(isinstance(part, Sums) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise UsageError(
            f"combine: expected the `sums` of parts (op.partials, op.live_weights), got {kinds}"
        )
    return functools.reduce(_combine_two, parts)


def _combine_two(one: Sums, other: Sums) -> Sums:
    how = {"max": torch.maximum, "min": torch.minimum}
    result = {}
    for name in _NAMES:
        combined = how.get(name.rpartition("_")[2], torch.add)
        result[name] = combined(getattr(one, name), getattr(other, name))
    return Sums(**result)


def sums(
    *,
    log_ratio: Tensor,  # [n] float64, NaN where not finite
    weight: Tensor,  # [n] float64, 0 where not kept
    keep: Tensor,  # [n] bool
    clipped: Tensor,  # scalar, kept slots whose weight was moved to a bound
    gates: list[Tensor],  # [n] bool each, which slots pass
    averaged: Tensor,  # [n] float64, the weights that `normalise` makes 1 in the mean
    mass: Tensor | None,  # [n] float64, None: 1 each
) -> Sums:
    """Return the sums of n slots."""
    count = log_ratio.new_tensor
    finite = log_ratio.isfinite()
    rho = torch.where(finite, log_ratio, -torch.inf).exp_()
    kept = keep.sum().double()
    rejected = [(~gate).sum() for gate in gates]
    if mass is None:
        masses = count(len(log_ratio)), kept, averaged.sum()
    else:
        masses = mass.sum(), mass @ keep.double(), mass @ averaged
    lowest, highest = torch.where(keep, weight, torch.inf), torch.where(keep, weight, -torch.inf)
    return Sums(
        slots=count(len(log_ratio)),
        kept=kept,
        nonfinite=(~finite).sum().double(),
        rejected=torch.stack([weight.new_zeros(()), *rejected])[1:].double(),
        weighted=(keep & (weight != 1)).sum().double(),
        clipped=clipped.double(),
        ratio=rho.sum(),
        ratio_square=rho @ rho,
        weight=weight.sum(),
        weight_square=weight @ weight,
        mass=masses[0],
        kept_mass=masses[1],
        weight_mass=masses[2],
        ratio_counts=histogram(log_ratio),
        weight_counts=histogram(torch.where(keep, weight.log(), torch.nan)),
        ratio_max=_largest(rho),
        weight_max=_largest(highest),
        weight_min=-_largest(-lowest),
    )


def _largest(values: Tensor) -> Tensor:
    """Return the largest of [n] as a scalar, -inf if there is none."""
    if not len(values):
        return values.new_tensor(-torch.inf)
    return values.max()


def report(config: CorrectionConfig, total: Sums) -> dict[str, float]:
    """Return the metrics of a correction; a config always gives the same names.

    Shares are of the trainable slots.
    """
    n, scale = total.slots, total.scale(config)
    nan = torch.full_like(n, torch.nan)
    some = total.kept > 0
    denominator = n
    if config.denominator == "kept":
        denominator = total.kept
    numbers = {
        "slots": n,
        "kept": total.kept,
        "denominator": denominator,
        "rejected": 1 - total.kept / n,
        "nonfinite": total.nonfinite / n,
        "weighted": total.weighted / n,
        "clipped": total.clipped / n,
        "scale": scale,
        "weight_mean": scale * total.weight / n,
        "weight_min": torch.where(some, scale * total.weight_min, nan),
        "weight_max": torch.where(some, scale * total.weight_max, nan),
        "weight_ess": total.weight.square() / (n * total.weight_square),
        "ratio_mean": total.ratio / (n - total.nonfinite),
        "ratio_max": torch.where(total.nonfinite < n, total.ratio_max, nan),
        "ratio_ess": total.ratio.square() / (n * total.ratio_square),
    }
    names = [f"{share:g}"[2:].ljust(2, "0") for share in QUANTILES]
    for name, value in zip(names, quantiles(total.ratio_counts, QUANTILES), strict=True):
        numbers[f"ratio_q{name}"] = value
    for name, value in zip(names, quantiles(total.weight_counts, QUANTILES), strict=True):
        numbers[f"weight_q{name}"] = scale * value
    labels = [gate.label for gate in config.gates]
    if config.weight.outside == "zero":
        labels.append("weight")
    for label, rejected in zip(labels, total.rejected, strict=True):
        numbers[f"rejected/{label}"] = rejected / n
    values = torch.stack(list(numbers.values())).tolist()
    return {f"correction/{name}": value for name, value in zip(numbers, values, strict=True)}


def histogram(log_ratio: Tensor) -> Tensor:
    """Return [BINS] int64, counts of the finite entries of [n]. Histograms of parts add up."""
    values = log_ratio.float()  # a copy, because the next lines work in place
    values = values[values.isfinite()]
    sign = values.sign()
    values.abs_().clamp_(min=SMALLEST / GROWTH).div_(SMALLEST).log_().div_(
        math.log(GROWTH)
    ).floor_()
    rank = values.add_(1).clamp_(0, BINS_PER_SIGN)  # 0: too small to matter
    return torch.bincount(rank.mul_(sign).add_(BINS_PER_SIGN).int(), minlength=BINS)


def quantiles(counts: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Return [len(shares)] float64, quantiles of rho; NaN if the histogram is empty.

    A quantile is the middle of the bin in which its share of the count is reached.
    """
    cumulative = counts.cumsum(0)
    wanted = torch.tensor(shares, dtype=torch.float64, device=counts.device) * cumulative[-1]
    index = (
        torch.searchsorted(cumulative.double(), wanted.clamp(min=0.5)).clamp(max=BINS - 1)
        - BINS_PER_SIGN
    )
    middle = SMALLEST * GROWTH ** (index.abs().double() - 0.5)
    values = torch.where(index == 0, 0.0, middle * index.sign()).exp()
    return torch.where(cumulative[-1] > 0, values, torch.nan)
