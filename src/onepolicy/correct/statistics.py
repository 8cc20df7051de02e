"""Statistics of a slot, and what a turn or sequence sums up to. No loops over sequences; sums of chunks add up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.correction import CorrectionConfig, Gate
from onepolicy.correct.slots import LOG_RATIO_LIMIT, Slots

PROBABILITY_MARGIN = 1e-6
"""Probabilities are kept this far from 0 and 1 inside a binary KL, so that its logarithms are finite (as OpenRLHF)."""


class UnitSums(NamedTuple):
    """Of each turn or sequence; NaN where some slot has no finite value. Chunks of a unit combine."""

    total: Tensor  # [U] float64
    slots: Tensor  # [U] float64, how many
    largest: Tensor  # [U] float64
    smallest: Tensor  # [U] float64

    def aggregate(self, how: str) -> Tensor:
        match how:
            case "sum":
                return self.total
            case "mean":
                return self.total / self.slots
            case "max":
                return self.largest
            case _:
                return self.smallest


Units = dict[str, UnitSums]


def statistic(name: str, slots: Slots) -> Tensor:
    """[n] float64 of a gate's statistic (see config.Gate); a ratio stays log rho, in which it is aggregated."""
    log_ratio = slots.log_ratio
    match name:
        case "ratio":
            return log_ratio
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return log_ratio.expm1() - log_ratio
        case "exp_abs":
            return log_ratio.abs().exp()
        case "prob_diff":
            return _prob_diff(slots)
        case "tv":
            return _prob_diff(slots).abs()
        case "trainer_prob":
            return torch.where(log_ratio.isfinite(), slots.logp_trainer.double().exp(), torch.nan)
        case "binary_kl":
            return _binary_kl(slots, slots.logp_rollout, slots.logp_trainer)
        case "binary_kl_sym":
            forward = _binary_kl(slots, slots.logp_rollout, slots.logp_trainer)
            return torch.maximum(forward, _binary_kl(slots, slots.logp_trainer, slots.logp_rollout))
        case _:
            raise AssertionError(name)


def _prob_diff(slots: Slots) -> Tensor:
    """p - q = q (rho - 1), without cancellation."""
    return slots.logp_rollout.double().exp() * slots.log_ratio.expm1()


def _binary_kl(slots: Slots, logp: Tensor, logp_other: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(other)): the sampled token against all others. NaN where the ratio is not finite,
    which the margin would hide."""
    p, q = (
        x.double().exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
        for x in (logp, logp_other)
    )
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return torch.where(slots.log_ratio.isfinite(), divergence, torch.nan)


def unit_index(slots: Slots, scope: str) -> tuple[Tensor, int]:
    """[n] int64 index of the turn or sequence each slot belongs to, and how many there are."""
    if slots.segment is None:
        raise UsageError(
            f"correction: a statistic of a whole {scope} needs the `segment` of each slot"
        )
    if scope == "sequence":
        return slots.segment, slots.sequences
    if slots.turn is None:
        raise UsageError("correction: a statistic of a turn needs the `turn` of each slot")
    if slots.units is not None:
        return slots.turn, slots.units
    return slots.segment * slots.turns + slots.turn, slots.sequences * slots.turns


def unit_sums(config: CorrectionConfig, slots: Slots) -> Units:
    """Everything of the configured turns and sequences that is a sum, a maximum or a minimum over slots.

    Slots of one sequence on several ranks (context parallelism): take this of each chunk, with `sequences` and
    `turns` given, `combine_units`, and hand the result to `partials`.
    """
    units: Units = {}
    for key, name, scope in needed(config):
        if key not in units:
            index, count = unit_index(slots, scope)
            units[key] = _sums(statistic(name, slots), index, count)
    for gate in config.gates:
        key = f"advantage/{gate.scope}"
        if gate.when != "always" and gate.scope != "token" and key not in units:
            index, count = unit_index(slots, gate.scope)
            units[key] = _sums(advantage_of(slots).double(), index, count)
    if slots.segment is not None:
        units["slots/sequence"] = _sums(
            torch.zeros_like(slots.log_ratio), slots.segment, slots.sequences
        )
    return units


def combine_units(parts: Iterable[Units]) -> Units:
    """Of all chunks. Every part must have come from the same config and the same `sequences`."""
    return functools.reduce(_combine_two, parts)


def _combine_two(one: Units, other: Units) -> Units:
    return {
        key: UnitSums(
            mine.total + other[key].total,
            mine.slots + other[key].slots,
            torch.maximum(mine.largest, other[key].largest),
            torch.minimum(mine.smallest, other[key].smallest),
        )
        for key, mine in one.items()
    }


def needed(config: CorrectionConfig) -> list[tuple[str, str, str]]:
    """(key, statistic, scope) of the weight and of each gate that looks at more than one slot."""
    needed = []
    if config.weight.level not in ("none", "token"):
        scope = "turn" if config.weight.level == "turn" else "sequence"
        needed.append((f"ratio/{scope}", "ratio", scope))
    return needed + [
        (f"{g.statistic}/{g.scope}", g.statistic, g.scope)
        for g in config.gates
        if g.scope != "token"
    ]


def _sums(values: Tensor, index: Tensor, count: int) -> UnitSums:
    zeros = values.new_zeros(count)
    low, high = values.new_full((count,), math.inf), values.new_full((count,), -math.inf)
    total = zeros.index_add(0, index, values)
    return UnitSums(
        total,
        zeros.index_add(0, index, torch.ones_like(values)),
        high.scatter_reduce(0, index, values, "amax")
        + 0 * total,  # + 0 * total: NaN marks a unit with a bad slot
        low.scatter_reduce(0, index, values, "amin") + 0 * total,
    )


def advantage_of(slots: Slots) -> Tensor:
    if slots.advantage is None:
        raise UsageError("correction: a gate that looks at the advantage's sign needs `advantage`")
    return slots.advantage


def value_of(gate: Gate, slots: Slots, units: Units) -> Tensor:
    """[n] float64: what the gate compares at each slot; a ratio in log space."""
    if gate.scope == "token":
        return statistic(gate.statistic, slots)
    return units[f"{gate.statistic}/{gate.scope}"].aggregate(gate.aggregate)[
        unit_index(slots, gate.scope)[0]
    ]


def weight_log_ratio(config: CorrectionConfig, slots: Slots, units: Units) -> Tensor:
    """[n] float64: log of the weight before its bounds, clamped."""
    match config.weight.level:
        case "none":
            return 0 * slots.log_ratio  # NaN stays NaN
        case "token":
            return slots.log_ratio
        case level:
            scope = "turn" if level == "turn" else "sequence"
            values = units[f"ratio/{scope}"].aggregate("mean" if level == "geometric" else "sum")
            return values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[unit_index(slots, scope)[0]]


def inside(values: Tensor, low: float | None, high: float | None, *, log: bool = False) -> Tensor:
    """low <= values <= high, inclusive; False for NaN. `log`: the values are logarithms of what is bounded.

    Compared in float32, the precision of log-probabilities: a value that equals its bound there is inside.
    """
    values, result = values.float(), ~values.isnan()
    for bound, compare in ((low, torch.ge), (high, torch.le)):
        if bound is not None:
            edge = math.log(bound) if log else bound
            result &= compare(values, torch.tensor(edge, dtype=torch.float32, device=values.device))
    return result


Edges = dict[str, Tensor]
"""Of each budget gate, by its label: the largest value that stays."""


def budget_edges(config: CorrectionConfig, parts: Callable[[], Iterable[Slots]]) -> Edges:
    """`parts`: all slots of the step."""
    edges: Edges = {}
    for gate in config.gates:
        if gate.aggregate == "budget":
            assert gate.high is not None
            edges[gate.label] = budget_edge(
                torch.cat([statistic(gate.statistic, p) for p in parts()]), gate.high
            )
    return edges


def budget_edge(values: Tensor, budget: float) -> Tensor:
    """Scalar: drop the largest of [n] values >= 0 until the mean of the rest is at most `budget` (M2PO), and this is
    the largest that stays; -1 if none does. Equal values go together, values that are not finite go."""
    ordered = values.masked_fill(~values.isfinite(), torch.inf).sort().values
    means = ordered.cumsum(0).div_(torch.arange(1, len(ordered) + 1, device=values.device))
    last = (means <= budget).sum()  # means of ascending values never fall
    nothing = values.new_tensor(-1.0)
    if last == 0:
        return nothing
    edge = ordered[last - 1]
    if last < len(ordered) and ordered[last] == edge:  # do not split ties at the edge
        below = torch.searchsorted(ordered, edge)
        return ordered[below - 1] if below > 0 else nothing
    return edge


def gate_keeps(gate: Gate, slots: Slots, units: Units, edges: Edges) -> Tensor:
    """[n] bool: which slots pass. A slot or unit whose statistic is not finite does not."""
    values = value_of(gate, slots, units)
    if gate.aggregate == "budget":
        return values.isfinite() & (values <= edges[gate.label])
    log = gate.statistic == "ratio"
    if gate.when == "always":
        return inside(values, gate.low, gate.high, log=log)
    sign = _sign(gate, slots, units)
    positive, negative = (sign > 0) | values.isnan(), (sign < 0) | values.isnan()
    if gate.when == "toward":
        passes_high = ~positive | inside(values, None, gate.high, log=log)
        return passes_high & (~negative | inside(values, gate.low, None, log=log))
    applies = positive if gate.when == "positive" else negative
    return ~applies | inside(values, gate.low, gate.high, log=log)


def _sign(gate: Gate, slots: Slots, units: Units) -> Tensor:
    """[n]: the advantage, or its mean over the slot's unit."""
    advantage = advantage_of(slots)
    if gate.scope == "token":
        return advantage
    return units[f"advantage/{gate.scope}"].total[unit_index(slots, gate.scope)[0]]
