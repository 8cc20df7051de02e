"""What a correction did in a step, as sums that add up over micro-batches and ranks, and as named numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from onepolicy.config.base import UsageError
from onepolicy.config.correction import CorrectionConfig
from onepolicy.correct.histogram import histogram, quantiles

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Add up with `combine`; any split of a batch gives the sums of the whole. Scalars are float64 tensors."""

    slots: Tensor  # trainable slots, before any rejection
    kept: Tensor
    nonfinite: Tensor  # slots whose ratio is not finite
    rejected: Tensor  # [G] slots rejected by each gate on its own; last by the weight's bounds, if they reject
    weighted: Tensor  # kept slots whose weight is not 1
    clipped: Tensor  # kept slots whose weight was moved to a bound
    ratio: Tensor  # sum of rho over finite slots
    ratio_square: Tensor
    weight: Tensor  # sum of weights, rejected slots as 0
    weight_square: Tensor
    mass: Tensor  # what the loss averages over: slots, or sequences as 1 / T_i a slot
    kept_mass: Tensor
    weight_mass: Tensor
    ratio_counts: Tensor  # [BINS] int64 histogram of log rho
    weight_counts: Tensor  # [BINS] int64 histogram of the log of the kept slots' weights
    ratio_max: Tensor
    weight_max: Tensor
    weight_min: Tensor  # of kept slots

    def scale(self, config: CorrectionConfig) -> Tensor:
        """What all weights are multiplied by. 1 if nothing is kept, where there is nothing to scale."""
        if config.normalise == "self":
            part = self.weight_mass
        elif config.denominator == "kept":
            part = self.kept_mass
        else:
            return torch.ones_like(self.mass)
        return torch.where(part > 0, self.mass / part, 1.0)


_NAMES = tuple(field.name for field in fields(Sums))


def combine(parts: Iterable[Sums]) -> Sums:
    """Sums of the whole from sums of its parts (micro-batches, ranks). UsageError without parts."""
    parts = list(parts)
    if not parts or not all(isinstance(part, Sums) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise UsageError(
            f"combine: expected the `sums` of parts (op.partials, op.live_weights), got {kinds}"
        )
    return functools.reduce(_combine_two, parts)


def _combine_two(one: Sums, other: Sums) -> Sums:
    result = {}
    for name in _NAMES:
        how = (
            torch.maximum
            if name.endswith("_max")
            else torch.minimum
            if name.endswith("_min")
            else torch.add
        )
        result[name] = how(getattr(one, name), getattr(other, name))
    return Sums(**result)


def sums(
    *,
    log_ratio: Tensor,  # [n] float64, NaN where not finite
    weight: Tensor,  # [n] float64, 0 where not kept
    keep: Tensor,  # [n] bool
    clipped: Tensor,  # scalar, kept slots whose weight was moved to a bound
    gates: list[Tensor],  # [n] bool each, which slots pass
    mass: Tensor | None,  # [n] float64, None: 1 each
) -> Sums:
    count = log_ratio.new_tensor
    finite = log_ratio.isfinite()
    rho = torch.where(finite, log_ratio, -torch.inf).exp_()
    kept = keep.sum().double()
    empty = not len(weight)
    return Sums(
        slots=count(len(log_ratio)),
        kept=kept,
        nonfinite=(~finite).sum().double(),
        rejected=torch.stack([(~gate).sum() for gate in gates]).double()
        if gates
        else weight.new_zeros(0),
        weighted=(keep & (weight != 1)).sum().double(),
        clipped=clipped.double(),
        ratio=rho.sum(),
        ratio_square=rho @ rho,
        weight=weight.sum(),
        weight_square=weight @ weight,
        mass=count(len(log_ratio)) if mass is None else mass.sum(),
        kept_mass=kept if mass is None else mass @ keep.double(),
        weight_mass=weight.sum() if mass is None else mass @ weight,
        ratio_counts=histogram(log_ratio),
        weight_counts=histogram(torch.where(keep, weight.log(), torch.nan)),
        ratio_max=count(-torch.inf) if empty else rho.max(),
        weight_max=count(-torch.inf) if empty else torch.where(keep, weight, -torch.inf).max(),
        weight_min=count(torch.inf) if empty else torch.where(keep, weight, torch.inf).min(),
    )


def report(config: CorrectionConfig, total: Sums) -> dict[str, float]:
    """The receipt: named numbers with a fixed set of names per config. Shares are of the trainable slots."""
    n, scale = total.slots, total.scale(config)
    nan = torch.full_like(n, torch.nan)
    some = total.kept > 0
    numbers = {
        "slots": n,
        "kept": total.kept,
        "denominator": total.kept if config.denominator == "kept" else n,
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
    labels = [gate.label for gate in config.gates] + ["weight"] * config.weight.rejects
    for label, rejected in zip(labels, total.rejected, strict=True):
        numbers[f"rejected/{label}"] = rejected / n
    values = torch.stack(list(numbers.values())).tolist()
    return {f"correction/{name}": value for name, value in zip(numbers, values, strict=True)}
