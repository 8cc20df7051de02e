"""Prediction of a correction's effect before a run: a Gaussian model of log rho.

l = log rho of each slot is independent and normal with mean -k and variance 2k under the rollout
policy, so that E[rho] = 1 and KL(rollout || trainer) = k. Sums over a sequence are then normal too:
with T slots the log of the product has mean -Tk and variance 2Tk, and e.g. a product that is
rejected above C keeps Phi((ln C - Tk) / sqrt(2Tk)) of the step. Means of k2, k3 and exp_abs are
modelled as normal with their exact mean and variance, and as independent of the other statistics.
Real mismatch has heavier tails. Statistics that need probabilities (tv, prob_diff, ...) are not
modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, Gate, UsageError
from onepolicy.correct.presets import check_config
from onepolicy.correct.statistics import inside
from onepolicy.notation import number

GRID = 4001
"""Points of the grid; the trapezoid rule on a normal density is then exact to 1e-12."""
SPAN = 10.0
"""Reach of the grid on either side, in standard deviations."""
MODELLED = {"ratio", "k1", "k2", "k3", "exp_abs"}
NOMINAL_KL = 1e-3
"""Ordinary k3 in nats a slot: the upper end of dense and the lower end of MoE models in the Miles
post.
"""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected effect of a correction."""

    keep: float  # share of slots left in the loss
    attenuation: float  # sum of weights / original count: the factor on the step
    not_modelled: tuple[str, ...]  # gates that are taken to accept everything


def predict(config: CorrectionConfig, kl: float, length: int, *, turns: int = 1) -> Prediction:
    """Return the expected keep rate and attenuation at `kl` nats a slot.

    Sequences have `length` slots in `turns` equal turns. For gates that look at the advantage's
    sign, both signs have equal shares. Raises UsageError if kl is not above 0 or length is below
    turns.
    """
    check_config("predict", config)
    numbers = isinstance(kl, int | float) and isinstance(length, int) and isinstance(turns, int)
    if not numbers or not (kl > 0 and length >= turns >= 1):
        raise UsageError(
            f"predict: kl={kl} length={length} turns={turns}; give kl > 0 and length >= turns >= 1"
        )
    kept, weight = 0.0, 0.0
    lengths = {"token": 1, "turn": length // turns, "sequence": length}
    for sign in (1, -1):
        keeps, weighs = _of_sign(config, kl, lengths, sign)
        kept, weight = kept + keeps / 2, weight + weighs / 2
    if config.normalise == "self" and weight > 0:
        weight = 1.0
    elif config.normalise == "batch":
        ungated = config.model_copy(update={"gates": (), "normalise": "none"})
        before = predict(ungated, kl, length, turns=turns).attenuation
        if before > 0:
            weight /= before
    elif config.denominator == "kept" and kept > 0:
        weight /= kept
    skipped = tuple(
        g.label for g in config.gates if g.statistic not in MODELLED or g.aggregate == "budget"
    )
    return Prediction(kept, weight, skipped)


def warning(
    config: CorrectionConfig,
    length: int,
    *,
    turns: int = 1,
    kl: float = NOMINAL_KL,
    least: float = 0.5,
) -> str | None:
    """Return a warning line if the correction would shrink the step at an ordinary mismatch."""
    found = predict(config, kl, length, turns=turns)
    if found.attenuation >= least:
        return None
    size = f"{length} tokens"
    if turns > 1:
        size = f"{size} in {turns} turns"
    return (
        f"correction {config.name} would multiply the step by {number(found.attenuation)} (keeping "
        f"{found.keep:.0%} of the slots) at a KL of {kl:g} nats a token and {size}; "
        "token-level weights do not depend on the length"
    )


def _of_sign(
    config: CorrectionConfig, kl: float, lengths: dict[str, int], sign: int
) -> tuple[float, float]:
    """Return share kept and mean weight at this sign of the advantage.

    The l of one slot is on a grid; the rest of its unit is in closed form.
    """
    z = torch.linspace(-SPAN, SPAN, GRID, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density, logr = density / density.sum(), -kl + math.sqrt(2 * kl) * z
    kept, weighed = torch.ones_like(logr), torch.ones_like(logr)
    level = {"geometric": "sequence"}.get(config.weight.level, config.weight.level)
    for scope, length in lengths.items():
        gates = [
            _signed(g, sign) for g in config.gates if g.scope == scope and g.statistic in MODELLED
        ]
        for gate in gates:
            if gate is not None and gate.aggregate != "budget" and not _on_sum(gate):
                factor = _pass(gate, logr, density, kl, length)
                kept, weighed = kept * factor, weighed * factor
        on_sum = [gate for gate in gates if gate is not None and _on_sum(gate)]
        band = _meet(_sum_band(gate, length) for gate in on_sum)
        keeps, weighs = _on_total(config, logr, kl, length, band, weighted=level == scope)
        kept, weighed = kept * keeps, weighed * weighs
    # Rounding of the sum, which depends on the processor, is taken out: all is exactly 1.
    whole = density @ torch.ones_like(density)
    return float(density @ kept / whole), float(density @ weighed / whole)


def _on_total(
    config: CorrectionConfig,
    logr: Tensor,
    kl: float,
    length: int,
    band: Interval,
    *,
    weighted: bool,
) -> tuple[Tensor, Tensor]:
    """Return P(total in band) and E[weight; total in band], given the l of one slot.

    total = l of the slot + the normal sum of the other length - 1 slots.
    """
    keep_band = band
    weight = config.weight
    power = 1.0
    if weight.level == "geometric":
        power = 1 / length
    low, high = (edge / power for edge in _log_bounds(weight.low, weight.high))
    if weighted and weight.outside == "zero":
        keep_band = _meet([band, (low, high)])
    keeps = _mass(logr, kl, length, keep_band, 0.0)
    if not weighted:
        return keeps, keeps
    weighs = _mass(logr, kl, length, _meet([keep_band, (low, high)]), power)
    if weight.outside == "zero":
        return keeps, weighs
    if weight.low is not None:
        below = _meet([band, (-math.inf, low)])
        weighs = weighs + weight.low * _mass(logr, kl, length, below, 0.0)
    if weight.high is not None:
        above = _meet([band, (high, math.inf)])
        weighs = weighs + weight.high * _mass(logr, kl, length, above, 0.0)
    return keeps, weighs


def _mass(logr: Tensor, kl: float, length: int, band: Interval, power: float) -> Tensor:
    """Return E[exp(power total); low <= total <= high], given the l of one slot."""
    low, high = band
    if low > high:
        return torch.zeros_like(logr)
    rest = length - 1
    if rest == 0:
        within = (logr >= low - 1e-12) & (logr <= high + 1e-12)
        return torch.where(within, (power * logr).exp(), 0.0)
    mean, variance = -rest * kl, 2 * rest * kl
    scale = torch.exp(power * logr + power * mean + power**2 * variance / 2)
    return scale * _normal_mass(logr + mean + power * variance, math.sqrt(variance), band)


def _normal_mass(mean: Tensor, deviation: float, band: Interval) -> Tensor:
    """Return P(low <= x <= high) of normal x."""
    low, high = band
    below_high: Tensor = torch.special.ndtr((high - mean) / deviation)
    below_low: Tensor = torch.special.ndtr((low - mean) / deviation)
    return below_high - below_low


def _pass(gate: Gate, logr: Tensor, density: Tensor, kl: float, length: int) -> Tensor:
    """Return P(gate passes), given the l of one slot, for statistics that no total determines."""
    own_inside = _inside(gate, logr)
    if length == 1:
        return own_inside
    if gate.aggregate in ("max", "min"):
        every = _inside(_one_sided(gate), logr)
        return every * float(density @ every) ** (length - 1)
    value = _value(gate.statistic, logr)
    mean = float(density @ value)
    deviation = math.sqrt(max(float(density @ (value - mean).square()), 1e-300) * (length - 1))
    low, high = (edge * _factor(gate, length) for edge in _bounds(gate.low, gate.high))
    return _normal_mass(value + mean * (length - 1), deviation, (low, high))


def _one_sided(gate: Gate) -> Gate:
    """Return the gate with the bound that every slot must meet: high of a max, low of a min."""
    drop = {"max": "low", "min": "high"}[gate.aggregate]
    return gate.model_copy(update={drop: None})


def _inside(gate: Gate, logr: Tensor) -> Tensor:
    log = gate.statistic == "ratio"
    return inside(_value(gate.statistic, logr), gate.low, gate.high, log=log).double()


def _value(name: str, logr: Tensor) -> Tensor:
    match name:
        case "ratio":
            return logr
        case "k1":
            return -logr
        case "k2":
            return logr.square() / 2
        case "k3":
            return logr.expm1() - logr
        case _:
            return logr.abs().exp()


def _signed(gate: Gate, sign: int) -> Gate | None:
    """Return the gate as it applies to slots with this sign of the advantage, or None."""
    if gate.when == "toward":
        bounds = {1: (None, gate.high), -1: (gate.low, None)}[sign]
        if bounds == (None, None):
            return None
        return gate.model_copy(update=dict(zip(("low", "high"), bounds, strict=True)))
    if gate.when == "always" or (gate.when == "positive") == (sign > 0):
        return gate
    return None


def _on_sum(gate: Gate) -> bool:
    return gate.statistic in ("ratio", "k1") and gate.aggregate in ("mean", "sum")


def _sum_band(gate: Gate, length: int) -> Interval:
    """Return the gate's bounds as bounds of the sum of l."""
    factor = _factor(gate, length)
    if gate.statistic == "k1":
        low, high = _bounds(gate.low, gate.high)
        return -high * factor, -low * factor
    low, high = _log_bounds(gate.low, gate.high)
    return low * factor, high * factor


def _factor(gate: Gate, length: int) -> int:
    """Return the factor from the gate's aggregate to a sum over `length` slots."""
    return {"mean": length}.get(gate.aggregate, 1)


def _bounds(low: float | None, high: float | None) -> Interval:
    """Return the bounds with -inf and inf for those that are not set."""
    lower, upper = -math.inf, math.inf
    if low is not None:
        lower = low
    if high is not None:
        upper = high
    return lower, upper


def _log_bounds(low: float | None, high: float | None) -> Interval:
    """Return the logarithms of bounds on a ratio."""
    lower, upper = -math.inf, math.inf
    if low is not None:
        lower = math.log(low)
    if high is not None:
        upper = math.log(high)
    return lower, upper


def _meet(bands: Iterable[Interval]) -> Interval:
    """Return the intersection of the intervals."""
    low, high = -math.inf, math.inf
    for band in bands:
        low, high = max(low, band[0]), min(high, band[1])
    return low, high
