"""What a correction will keep, and by what it will multiply the step, before a run: a Gaussian model of log rho.

l = log rho of each slot is independent and normal with mean -k and variance 2k under the rollout policy, so that
E[rho] = 1 and KL(rollout || trainer) = k. Sums over a sequence are then normal too: with T slots log of the product has
mean -Tk and variance 2Tk, and e.g. a product that is rejected above C keeps Phi((ln C - Tk) / sqrt(2Tk)) of the step.
Means of k2, k3 and exp_abs are taken as normal with their exact mean and variance, and as independent of the other
statistics; real mismatch has heavier tails. Statistics that need probabilities (tv, prob_diff, ...) are not modelled.
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

GRID, SPAN = (
    4001,
    10.0,
)  # points, standard deviations: the trapezoid rule on a normal density is exact to 1e-12
MODELLED = {"ratio", "k1", "k2", "k3", "exp_abs"}
NOMINAL_KL = 1e-3
"""Nats a slot: the upper end of dense and the lower end of MoE models in the Miles post."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    keep: float  # share of slots left in the loss
    attenuation: float  # sum of weights / original count: what the step is multiplied by, times its rejections
    not_modelled: tuple[str, ...]  # gates taken as accepting everything


def predict(config: CorrectionConfig, kl: float, length: int, *, turns: int = 1) -> Prediction:
    """Expected keep-rate and attenuation at `kl` nats a slot, with sequences of `length` slots in `turns` equal turns.

    A gate that looks at the advantage's sign is taken over equal shares of both signs.
    """
    check_config("predict", config)
    numbers = isinstance(kl, int | float) and isinstance(length, int) and isinstance(turns, int)
    if not numbers or not (kl > 0 and length >= turns >= 1):
        raise UsageError(
            f"predict: kl={kl} length={length} turns={turns}; give kl > 0 and length >= turns >= 1"
        )
    kept, weight = 0.0, 0.0
    for sign in (1, -1):
        keeps, weighs = _of_sign(
            config, kl, {"token": 1, "turn": length // turns, "sequence": length}, sign
        )
        kept, weight = kept + keeps / 2, weight + weighs / 2
    if config.normalise == "self" and weight > 0:
        weight = 1.0
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
    """A line for the start of a run whose correction would silently shrink the step at an ordinary mismatch."""
    found = predict(config, kl, length, turns=turns)
    if found.attenuation >= least:
        return None
    return (
        f"correction {config.name} would multiply the step by {found.attenuation:.2g} (keeping {found.keep:.0%} of the "
        f"slots) at a KL of {kl:g} nats a token and {length} tokens{f' in {turns} turns' if turns > 1 else ''}; "
        "token-level weights do not depend on the length"
    )


def _of_sign(
    config: CorrectionConfig, kl: float, lengths: dict[str, int], sign: int
) -> tuple[float, float]:
    """(share kept, mean weight) at this sign of the advantage: the slot's own l on a grid, the rest in closed form."""
    z = torch.linspace(-SPAN, SPAN, GRID, dtype=torch.float64)
    density = torch.exp(-z.square() / 2)
    density, own = density / density.sum(), -kl + math.sqrt(2 * kl) * z
    kept, weighed = torch.ones_like(own), torch.ones_like(own)
    level = {"geometric": "sequence"}.get(config.weight.level, config.weight.level)
    for scope, length in lengths.items():
        gates = [
            _signed(g, sign) for g in config.gates if g.scope == scope and g.statistic in MODELLED
        ]
        for gate in gates:
            if gate is not None and gate.aggregate != "budget" and not _on_sum(gate):
                factor = _pass(gate, own, density, kl, length)
                kept, weighed = kept * factor, weighed * factor
        band = _meet(
            _sum_band(gate, length) for gate in gates if gate is not None and _on_sum(gate)
        )
        keeps, weighs = _on_total(config, own, kl, length, band, weighted=level == scope)
        kept, weighed = kept * keeps, weighed * weighs
    return float(density @ kept), float(density @ weighed)


def _on_total(
    config: CorrectionConfig, own: Tensor, kl: float, length: int, band: Interval, *, weighted: bool
) -> tuple[Tensor, Tensor]:
    """P(total in band) and E[weight; total in band] given the slot's own l; total = own + normal rest of length - 1."""
    keep_band = band
    weight = config.weight
    power = 1 / length if weight.level == "geometric" else 1.0
    low = -math.inf if weight.low is None else math.log(weight.low) / power
    high = math.inf if weight.high is None else math.log(weight.high) / power
    if weighted and weight.rejects:
        keep_band = _meet([band, (low, high)])
    keeps = _mass(own, kl, length, keep_band, 0.0)
    if not weighted:
        return keeps, keeps
    weighs = _mass(own, kl, length, _meet([keep_band, (low, high)]), power)
    if not weight.rejects:
        if weight.low is not None:
            weighs = weighs + weight.low * _mass(
                own, kl, length, _meet([band, (-math.inf, low)]), 0.0
            )
        if weight.high is not None:
            weighs = weighs + weight.high * _mass(
                own, kl, length, _meet([band, (high, math.inf)]), 0.0
            )
    return keeps, weighs


def _mass(own: Tensor, kl: float, length: int, band: Interval, power: float) -> Tensor:
    """E[exp(power total); low <= total <= high] given own."""
    low, high = band
    if low > high:
        return torch.zeros_like(own)
    rest = length - 1
    if rest == 0:
        within = (own >= low - 1e-12) & (own <= high + 1e-12)
        return torch.where(within, (power * own).exp(), 0.0)
    mean, variance = -rest * kl, 2 * rest * kl
    scale = torch.exp(power * own + power * mean + power**2 * variance / 2)
    centre, deviation = own + mean + power * variance, math.sqrt(variance)
    return scale * (
        torch.special.ndtr((high - centre) / deviation)
        - torch.special.ndtr((low - centre) / deviation)
    )


def _pass(gate: Gate, own: Tensor, density: Tensor, kl: float, length: int) -> Tensor:
    """P(gate passes | own) for statistics that are not a function of the total."""
    own_inside = _inside(gate, own)
    if length == 1:
        return own_inside
    if gate.aggregate in ("max", "min"):
        every = _inside(_one_sided(gate), own)
        return every * float(density @ every) ** (length - 1)
    value = _value(gate.statistic, own)
    mean = float(density @ value)
    deviation = math.sqrt(max(float(density @ (value - mean).square()), 1e-300) * (length - 1))
    total = length if gate.aggregate == "mean" else 1
    low = -math.inf if gate.low is None else gate.low * total
    high = math.inf if gate.high is None else gate.high * total
    centre = value + mean * (length - 1)
    return torch.special.ndtr((high - centre) / deviation) - torch.special.ndtr(
        (low - centre) / deviation
    )


def _one_sided(gate: Gate) -> Gate:
    """max <= high says that every slot is, as min >= low does; max >= low and min <= high say little: left out."""
    drop = "low" if gate.aggregate == "max" else "high"
    return gate.model_copy(update={drop: None})


def _inside(gate: Gate, own: Tensor) -> Tensor:
    log = gate.statistic == "ratio"
    return inside(_value(gate.statistic, own), gate.low, gate.high, log=log).double()


def _value(name: str, own: Tensor) -> Tensor:
    match name:
        case "ratio":
            return own
        case "k1":
            return -own
        case "k2":
            return own.square() / 2
        case "k3":
            return own.expm1() - own
        case _:
            return own.abs().exp()


def _signed(gate: Gate, sign: int) -> Gate | None:
    """The gate as slots with this sign of the advantage see it."""
    if gate.when == "toward":
        bound = gate.high if sign > 0 else gate.low
        return (
            None if bound is None else gate.model_copy(update={"low" if sign > 0 else "high": None})
        )
    seen = {"always": True, "positive": sign > 0, "negative": sign < 0}[gate.when]
    return gate if seen else None


def _on_sum(gate: Gate) -> bool:
    return gate.statistic in ("ratio", "k1") and gate.aggregate in ("mean", "sum")


def _sum_band(gate: Gate, length: int) -> Interval:
    """The gate's bounds as bounds of the sum of l."""
    factor = length if gate.aggregate == "mean" else 1
    if gate.statistic == "k1":
        low = -math.inf if gate.high is None else -gate.high
        high = math.inf if gate.low is None else -gate.low
    else:
        low = -math.inf if gate.low is None else math.log(gate.low)
        high = math.inf if gate.high is None else math.log(gate.high)
    return low * factor, high * factor


def _meet(bands: Iterable[Interval]) -> Interval:
    low, high = -math.inf, math.inf
    for band in bands:
        low, high = max(low, band[0]), min(high, band[1])
    return low, high
