"""Turns as units of corrections, by hand: two paths of two turns each, with observed slots."""

import math

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.config.correction import Gate, Weight
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.reweight import Applied, reweight

NAN = math.nan
# path 0: turn 0 = (2, 3), turn 1 = (1/2, 1);  path 1, forked after its first turn: turn 1 = (1/4,
# 2), turn 2 = (5,)
RHO = [NAN, 2, 3, NAN, 0.5, 1, NAN, 0.25, 2, NAN, 5]
TURN = [-1, 0, 0, -1, 1, 1, -1, 1, 1, -1, 2]
SEGMENT = [0] * 6 + [1] * 5
ADVANTAGE = [0.0, 1, -3, 0, 2, -1, 0, -1, -1, 0, 1]
MASK = [turn >= 0 for turn in TURN]
PRODUCTS = [6, 6, 0.5, 0.5, 0.5, 0.5, 5]


def applied(rho: list[float] = RHO, **config) -> Applied[Tensor]:
    return reweight(
        torch.tensor(rho).log(),
        torch.zeros(len(rho)),
        torch.tensor(MASK),
        CorrectionConfig(**config),
        segment=torch.tensor(SEGMENT),
        turn=torch.tensor(TURN),
        advantage=torch.tensor(ADVANTAGE),
    )


def own(values: Tensor) -> list:
    """Return the values of the trainable slots. Nothing is kept elsewhere."""
    assert not values[~torch.tensor(MASK)].any()
    return values[torch.tensor(MASK)].tolist()


@pytest.mark.parametrize(
    ("bounds", "weights"),
    [
        ({}, PRODUCTS),
        ({"high": 2.0}, [2, 2, 0.5, 0.5, 0.5, 0.5, 2]),
        ({"low": 0.75, "high": 5.5}, [5.5, 5.5, 0.75, 0.75, 0.75, 0.75, 5]),
        ({"low": 0.75, "high": 5.5, "outside": "zero"}, [0, 0, 0, 0, 0, 0, 5]),
    ],
)
def test_the_weight_of_a_turn_is_the_product_of_its_ratios(bounds, weights):
    """Observed slots, other turns, and turns of the same number in other paths do not enter it."""
    found = applied(weight=Weight(level="turn", **bounds))
    assert own(found.weight) == pytest.approx(weights)
    assert own(found.keep) == [w > 0 for w in weights]
    assert found.denominator == 7


def test_scaled_weights_of_turns():
    """Only the last turn is kept. Its one slot of weight 5 becomes 7 (mean 1 over 7 slots), or 5 x
    7 / 1."""
    band = Weight(level="turn", low=0.75, high=5.5, outside="zero")
    assert own(applied(weight=band, normalise="self").weight) == pytest.approx([0] * 6 + [7])
    assert own(applied(weight=band, denominator="kept").weight) == pytest.approx([0] * 6 + [35])


def test_an_infinite_ratio_rejects_only_its_turn():
    rho = [*RHO[:4], math.inf, *RHO[5:]]
    gate = Gate(statistic="k3", aggregate="mean", scope="turn", high=100.0)
    for config in ({"weight": Weight(level="turn")}, {"gates": (gate,)}):
        found = own(applied(rho, **config, max_nonfinite=0.5).keep)
        assert found == [True, True, False, False, True, True, True]


L2, L3, L4, L5 = map(math.log, (2, 3, 4, 5))
VALUES = {  # statistic, aggregate -> of the four turns
    ("ratio", "sum"): [6, 0.5, 0.5, 5],
    ("ratio", "mean"): [6**0.5, 0.5**0.5, 0.5**0.5, 5],
    ("ratio", "max"): [3, 1, 2, 5],
    ("ratio", "min"): [2, 0.5, 0.25, 5],
    ("k1", "mean"): [-math.log(6) / 2, L2 / 2, L2 / 2, -L5],
    ("k2", "sum"): [(L2**2 + L3**2) / 2, L2**2 / 2, (L4**2 + L2**2) / 2, L5**2 / 2],
    ("k3", "mean"): [(3 - L2 - L3) / 2, (-0.5 + L2) / 2, (0.25 + L4 - L2) / 2, 4 - L5],
    ("exp_abs", "max"): [3, 2, 4, 5],
}


def test_gates_of_turns_at_each_of_their_values(subtests):
    """A bound just above a turn's value keeps it. One just below rejects all on that side."""
    for (statistic, aggregate), values in VALUES.items():
        agree = {"ratio": 1.0, "exp_abs": 1.0}.get(statistic, 0.0)
        edges = [value for value in values if value > agree]
        for bound in (edge + step for edge in edges for step in (-1e-4, 1e-4)):
            with subtests.test(statistic, aggregate=aggregate, bound=bound):
                gate = Gate(statistic=statistic, aggregate=aggregate, scope="turn", high=bound)
                kept = [value <= bound for value in values for _ in range(2)]
                kept.pop()  # the last turn has one slot
                assert own(applied(gates=(gate,)).keep) == kept


def test_turns_of_a_negative_mean_advantage():
    """Means of the turns: -1, 1/2, -1, 1. Of the products 6 and 5 only the first is rejected."""
    gate = Gate(statistic="ratio", aggregate="sum", scope="turn", high=2.0, when="negative")
    assert own(applied(gates=(gate,)).keep) == [False, False, True, True, True, True, True]


def test_one_turn_a_path_is_the_sequence():
    rho, segment = torch.tensor([2, 3, 0.5, 0.25]), torch.tensor([0, 0, 1, 1])
    zeros, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    ids = {"segment": segment, "turn": zeros.long()}
    configs = [CorrectionConfig(weight=Weight(level=x, high=4.0)) for x in ("turn", "sequence")]
    both = [reweight(rho.log(), zeros, mask, config, **ids) for config in configs]
    assert both[0].weight.tolist() == both[1].weight.tolist() == pytest.approx([4, 4, 0.125, 0.125])


def test_live_weights_and_gates_of_turns():
    """The loss of a micro-batch of whole paths has the values that `reweight` gives."""
    config = CorrectionConfig(
        ratio="new/rollout",
        weight=Weight(level="turn", high=4.0),
        gates=(Gate(statistic="ratio", aggregate="max", scope="turn", high=2.5),),
    )
    rho, mask, segment, turn = (torch.tensor(x)[6:] for x in (RHO, MASK, SEGMENT, TURN))
    more = {"segment": segment - 1, "turn": turn}
    found = live_weights(rho.log(), torch.zeros(5), mask, config.live_part, **more)
    assert found.weight.tolist() == pytest.approx([0, 0.5, 0.5, 0, 0])
    assert found.keep.tolist() == [False, True, True, False, False]
