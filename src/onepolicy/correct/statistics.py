"""Statistics of slots, and their sums over turns and sequences.

Nothing loops over sequences, and sums of chunks add up to the sums of the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.correction import STATISTICS, CorrectionConfig, Gate
from onepolicy.correct.slots import Slots

PROBABILITY_MARGIN = 1e-6
"""Distance that a binary KL keeps its probabilities from 0 and 1, so that its logarithms are finite
(as OpenRLHF does).
"""


class UnitSums(NamedTuple):
    """Sums of each unit (a turn or sequence); NaN where some slot of it has no finite value."""

    total: Tensor  # [U] float64
    slots: Tensor  # [U] float64, number of slots
    largest: Tensor  # [U] float64
    smallest: Tensor  # [U] float64

    def aggregate(self, how: str) -> Tensor:
        """Return [U] float64: the sum, mean, max or min of each unit."""
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
    """Return [n] float64: a gate's statistic, from the function of its name.

    A ratio is returned as log rho, because it is aggregated in log space.
    """
    return FUNCTIONS[name](slots)


def _prob_diff(slots: Slots) -> Tensor:
    """Return p - q as q (rho - 1), which does not cancel."""
    return slots.logp_rollout.double().exp() * slots.log_ratio.expm1()


def _trainer_prob(slots: Slots) -> Tensor:
    return torch.where(slots.log_ratio.isfinite(), slots.logp_trainer.double().exp(), torch.nan)


def _binary_kl_forward(slots: Slots) -> Tensor:
    return _binary_kl(slots, slots.logp_rollout, slots.logp_trainer)


def _binary_kl_sym(slots: Slots) -> Tensor:
    other = _binary_kl(slots, slots.logp_trainer, slots.logp_rollout)
    return torch.maximum(_binary_kl_forward(slots), other)


def _binary_kl(slots: Slots, logp: Tensor, logp_other: Tensor) -> Tensor:
    """Return KL(Bernoulli(p) || Bernoulli(other)), [n] float64.

    The two outcomes are the sampled token and all others. It is NaN where the ratio is not finite,
    which PROBABILITY_MARGIN would hide.
    """
    p, q = (
        x.double().exp().clamp(PROBABILITY_MARGIN, 1 - PROBABILITY_MARGIN)
        for x in (logp, logp_other)
    )
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return torch.where(slots.log_ratio.isfinite(), divergence, torch.nan)


FUNCTIONS: dict[str, Callable[[Slots], Tensor]] = {
    "ratio": lambda slots: slots.log_ratio,
    "k1": lambda slots: -slots.log_ratio,
    "k2": lambda slots: slots.log_ratio.square() / 2,
    "k3": lambda slots: slots.log_ratio.expm1() - slots.log_ratio,
    "exp_abs": lambda slots: slots.log_ratio.abs().exp(),
    "prob_diff": _prob_diff,
    "tv": lambda slots: _prob_diff(slots).abs(),
    "trainer_prob": _trainer_prob,
    "binary_kl": _binary_kl_forward,
    "binary_kl_sym": _binary_kl_sym,
}
assert FUNCTIONS.keys() == STATISTICS.keys()


def unit_index(slots: Slots, scope: str) -> tuple[Tensor, int]:
    """Return [n] int64, the turn or sequence of each slot, and the number of these units."""
    if slots.segment is None:
        raise UsageError(
            f"correction: a statistic of a whole {scope} needs the `segment` of each slot; give "
            "[B, T] or a list of sequences, or with [T] segment= (torch.zeros(T).long() for one)"
        )
    if scope == "sequence":
        return slots.segment, slots.sequences
    if slots.turn is None:
        raise UsageError("correction: a statistic of a turn needs the `turn` of each slot")
    if slots.units is not None:
        return slots.turn, slots.units
    return slots.segment * slots.turns + slots.turn, slots.sequences * slots.turns


def unit_sums(config: CorrectionConfig, slots: Slots) -> Units:
    """Return the sums, maxima and minima over slots that the config needs of turns and sequences.

    If one sequence lies on several ranks (context parallelism), compute this for each chunk with
    `sequences` and `turns` given, merge with `combine_units` and pass the result to `partials`.
    """
    units: Units = {}
    for key, name, scope in _needed(config):
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
    """Merge the units of all chunks.

    All must come from the same config and the same `sequences`.
    """
    return functools.reduce(_combine_two, parts)


def _combine_two(one: Units, other: Units) -> Units:
    return {
        key: UnitSums(
            sums.total + other[key].total,
            sums.slots + other[key].slots,
            torch.maximum(sums.largest, other[key].largest),
            torch.minimum(sums.smallest, other[key].smallest),
        )
        for key, sums in one.items()
    }


def _needed(config: CorrectionConfig) -> list[tuple[str, str, str]]:
    """Return (key, statistic, scope) of the weight and of the gates that span several slots."""
    needed = []
    if config.weight.level not in ("none", "token"):
        scope = weight_scope(config.weight.level)
        needed.append((f"ratio/{scope}", "ratio", scope))
    return needed + [
        (f"{g.statistic}/{g.scope}", g.statistic, g.scope)
        for g in config.gates
        if g.scope != "token"
    ]


def weight_scope(level: str) -> str:
    """Return the unit that a weight of this level is summed over."""
    if level == "turn":
        return "turn"
    return "sequence"


def _sums(values: Tensor, index: Tensor, count: int) -> UnitSums:
    zeros = values.new_zeros(count)
    low, high = values.new_full((count,), math.inf), values.new_full((count,), -math.inf)
    total = zeros.index_add(0, index, values)
    # Adding 0 * total carries NaN over from a unit that has a slot without a finite value.
    return UnitSums(
        total,
        zeros.index_add(0, index, torch.ones_like(values)),
        high.scatter_reduce(0, index, values, "amax") + 0 * total,
        low.scatter_reduce(0, index, values, "amin") + 0 * total,
    )


def advantage_of(slots: Slots) -> Tensor:
    """Return [n], the advantage. Raises UsageError if the slots have none."""
    if slots.advantage is None:
        raise UsageError("correction: a gate that looks at the advantage's sign needs `advantage`")
    return slots.advantage


def value_of(gate: Gate, slots: Slots, units: Units) -> Tensor:
    """Return [n] float64: the value that the gate bounds at each slot; a ratio in log space."""
    if gate.scope == "token":
        return statistic(gate.statistic, slots)
    per_unit = units[f"{gate.statistic}/{gate.scope}"].aggregate(gate.aggregate)
    index, _ = unit_index(slots, gate.scope)
    return per_unit[index]


def inside(values: Tensor, low: float | None, high: float | None, *, log: bool = False) -> Tensor:
    """Return where low <= values <= high, inclusive; False for NaN.

    With `log` the values are logarithms, the bounds are not. The comparison is in float32, the
    precision of log-probabilities, so a value that equals its bound in float32 is inside.
    """
    values, result = values.float(), ~values.isnan()
    for bound, compare in ((low, torch.ge), (high, torch.le)):
        if bound is not None:
            edge = bound
            if log:
                edge = math.log(bound)
            result &= compare(values, torch.tensor(edge, dtype=torch.float32, device=values.device))
    return result


Edges = dict[str, Tensor]
"""The largest value that stays, by the label of each budget gate."""


def budget_edges(config: CorrectionConfig, parts: Callable[[], Iterable[Slots]]) -> Edges:
    """Return the edge of each budget gate. `parts` yields all slots of the step."""
    edges: Edges = {}
    for gate in config.gates:
        if gate.aggregate == "budget":
            assert gate.high is not None
            values = torch.cat([statistic(gate.statistic, part) for part in parts()])
            edges[gate.label] = budget_edge(values, gate.high)
    return edges


def budget_edge(values: Tensor, budget: float) -> Tensor:
    """Return the largest of [n] values >= 0 that stays within the budget (M2PO).

    The result is a scalar, -1 if no value stays. The largest values are dropped until the mean of
    the rest is at most `budget`. Equal values are dropped together, and values that are not finite
    are always dropped.
    """
    ordered = values.masked_fill(~values.isfinite(), torch.inf).sort().values
    means = ordered.cumsum(0).div_(torch.arange(1, len(ordered) + 1, device=values.device))
    last = (means <= budget).sum()  # means of ascending values never fall
    nothing = values.new_tensor(-1.0)
    if last == 0:
        return nothing
    edge = ordered[last - 1]
    if last < len(ordered) and ordered[last] == edge:  # do not split ties at the edge
        below = torch.searchsorted(ordered, edge)
        if below == 0:
            return nothing
        return ordered[below - 1]
    return edge


def gate_keeps(gate: Gate, slots: Slots, units: Units, edges: Edges) -> Tensor:
    """Return [n] bool: the slots that pass.

    Where the statistic is not finite, the slot or unit fails.
    """
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
    applies = {"positive": positive, "negative": negative}[gate.when]
    return ~applies | inside(values, gate.low, gate.high, log=log)


def _sign(gate: Gate, slots: Slots, units: Units) -> Tensor:
    """Return [n]: a number with the sign of the advantage, or of its sum over the slot's unit."""
    advantage = advantage_of(slots)
    if gate.scope == "token":
        return advantage
    return units[f"advantage/{gate.scope}"].total[unit_index(slots, gate.scope)[0]]
