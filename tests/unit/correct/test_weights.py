"""Weights and gates against hand-computed closed forms (B0, B2, B3), bad slots, and the
correction's statistics."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, Gate, UsageError, Weight
from onepolicy.config.correction import correction_presets
from onepolicy.correct.presets import preset
from onepolicy.correct.slots import slots
from onepolicy.correct.statistics import statistic
from onepolicy.correct.weights import Applied, reweight

# B0: two sequences; the last two slots of the second are masked and hold garbage
RHO = torch.tensor([1, 4, 1 / 4, 1, 2, 2, math.nan, 1e9], dtype=torch.float64)
SEGMENT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
MASK = torch.tensor([True] * 6 + [False] * 2)
FIXED = [name for name in correction_presets() if not preset(name).live]
ALL = torch.ones(20, dtype=torch.bool)


def apply(
    config: CorrectionConfig,
    rho: Tensor = RHO,
    mask: Tensor = MASK,
    segment: Tensor = SEGMENT,
    **more,
):
    """Apply the correction to rollout log-probabilities that are not all the same. Ratio statistics
    depend on the ratio alone."""
    rollout = -torch.linspace(9, 10, len(rho), dtype=torch.float64)
    return reweight(rho.log() + rollout, rollout, mask, config, segment=segment, **more)


def token_mean(applied: Applied[Tensor]) -> float:
    return float(applied.weight.double().sum() / applied.denominator)


def sequence_mean(applied: Applied[Tensor]) -> float:
    """Return the loss for unit losses: mean over sequences of their token means, original
    lengths."""
    return float(
        (applied.weight[:4].double().sum() / 4 + applied.weight[4:].double().sum() / 2) / 2
    )


def geo(low: float, high: float) -> Gate:
    return Gate(statistic="ratio", aggregate="mean", scope="sequence", low=low, high=high)


B0 = {
    "recompute": (preset("recompute"), 1, 1, 1, 1),
    "vanilla-is": (preset("vanilla-is"), 1.708333, 1.78125, 1.708333, 0.6719),
    "tis": (preset("tis"), 1.375, 1.53125, 1.375, 0.8067),
    "cis": (preset("cis"), 1.416667, 1.5625, 1.416667, 0.8450),
    "icepop .5 2": (preset("icepop", weight={"high": 2.0}), 1.0, 1.25, 1.5, 0.6),
    "mis without snis": (preset("mis", normalise="none"), 1.0, 1.25, 1.5, 0.6),
    "icepop .5 5": (preset("icepop"), 1.666667, 1.75, 2.0, 0.6410),
    "seq-tis": (preset("seq-tis"), 1.333333, 1.5, 1.333333, 0.8889),
    "seq-mis, product 1": (
        preset(
            "seq-mis",
            gates=[{"statistic": "ratio", "aggregate": "sum", "scope": "sequence", "high": 2.0}],
        ),
        0.666667,
        0.5,
        1.0,
        0.6667,
    ),
    "seq-mis": (preset("seq-mis"), 0.666667, 0.5, 1.0, 0.6667),
    "geo-rs": (preset("geo-rs"), 0.666667, 0.5, 1.0, 0.6667),
    "trl-default": (preset("trl-default"), 0.666667, 0.5, 1.0, 0.6667),
    "seq-mask-tis": (preset("seq-mask-tis"), 1.041667, 0.78125, 1.5625, 0.3604),
    "geo-rs-token-tis": (preset("geo-rs-token-tis"), 0.708333, 0.53125, 1.0625, 0.4966),
    "miles-moe": (preset("miles-moe"), 0.666667, 0.5, 1.0, 0.5926),
    "miles-moe-wide without snis": (
        preset("miles-moe-wide", normalise="none"),
        0.75,
        0.5625,
        1.125,
        0.54,
    ),
    "miles-moe-tis": (preset("miles-moe-tis"), 1.166667, 1.25, 1.166667, 0.9074),
    "k3-rs .5": (
        preset(
            "k3-rs",
            gates=[{"statistic": "k3", "aggregate": "mean", "scope": "sequence", "high": 0.5}],
        ),
        0.333333,
        0.5,
        1.0,
        0.3333,
    ),
    "veto .3 + tis": (
        preset(
            "tis",
            gates=[{"statistic": "ratio", "aggregate": "min", "scope": "sequence", "low": 0.3}],
        ),
        0.666667,
        1.0,
        2.0,
        0.3333,
    ),
}


@pytest.mark.parametrize("name", B0)
def test_closed_forms_b0(name: str) -> None:
    """The sequence products are 1 and 4, geometric means 1 and 2, k3 means .5625 and .306853 (x is
    masked)."""
    config, tokens, sequences, kept, ess = B0[name]
    applied = apply(config)
    assert token_mean(applied) == pytest.approx(tokens, abs=1e-6)
    assert sequence_mean(applied) == pytest.approx(sequences, abs=1e-6)
    assert applied.weight.sum() / applied.keep.sum() == pytest.approx(kept, abs=1e-6)
    assert applied.report["correction/weight_ess"] == pytest.approx(ess, abs=1e-4)
    assert applied.denominator == 6
    assert not applied.keep[6:].any()
    assert (applied.weight[~applied.keep] == 0).all()
    if config.rejects and config.normalise == "none":
        loud = apply(config.model_copy(update={"denominator": "kept"}))
        assert token_mean(loud) == pytest.approx(kept, abs=1e-6)
        assert loud.report["correction/denominator"] == applied.keep.sum()


@pytest.mark.parametrize(
    "name", [n for n, (config, *_) in B0.items() if config.rejects or config.weight.level != "none"]
)
def test_self_normalised_unit_losses_give_one(name: str) -> None:
    config = B0[name][0].model_copy(update={"normalise": "self"})
    assert token_mean(apply(config)) == pytest.approx(1, abs=1e-6)
    assert sequence_mean(apply(config, average="sequences")) == pytest.approx(1, abs=1e-6)


def test_self_normalised_icepop_on_one_sequence() -> None:
    """mis.py, which divides by a mean that includes the rejected weights, gives .64 for both."""
    config = preset("icepop", weight={"high": 2.0}, normalise="self")
    applied = apply(config, RHO[:4], MASK[:4], SEGMENT[:4])
    assert applied.weight.tolist() == pytest.approx([2, 0, 0, 2])
    assert applied.report["correction/scale"] == pytest.approx(2)


def test_gates_in_any_order_b2() -> None:
    """Each gate sees the original mask: the geometric mean .316 rejects all four, also the three
    good tokens."""
    rho = torch.tensor([1, 1, 1, 0.01], dtype=torch.float64)
    gates = (
        Gate(statistic="ratio", low=0.5, high=2),
        geo(0.99, 1.01),
        Gate(statistic="k3", high=5),
    )
    for order in permutations(gates):
        applied = apply(CorrectionConfig(gates=order), rho, ALL[:4], SEGMENT[:4])
        assert not applied.keep.any()
        assert applied.report["correction/rejected/ratio.token"] == 0.25
        assert applied.report["correction/rejected/ratio.mean.sequence"] == 1
        assert applied.report["correction/rejected/k3.token"] == 0


@pytest.mark.parametrize(
    ("low", "high", "kept"),
    [
        (0.6, 1.4, [0.6, 1, 1.3]),
        (0.1, 1.2, [0.3, 0.6, 1]),
        (None, 1.3, [0.3, 0.6, 1, 1.3]),
        (0.6, None, [0.6, 1, 1.3, 1.9, 3]),
    ],
)
def test_bounds_are_inclusive_and_on_rho_b3(
    low: float | None, high: float | None, kept: list[float]
) -> None:
    rho = torch.tensor([0.3, 0.6, 1, 1.3, 1.9, 3])
    for dtype in (torch.float32, torch.float64):
        config = CorrectionConfig(gates=(Gate(statistic="ratio", low=low, high=high),))
        values = rho.to(dtype)
        applied = reweight(values.log(), torch.zeros_like(values), ALL[:6], config)
        assert values[applied.keep].tolist() == pytest.approx(kept)
        zero = CorrectionConfig(weight=Weight(level="token", low=low, high=high, outside="zero"))
        assert torch.equal(
            reweight(values.log(), torch.zeros_like(values), ALL[:6], zero).keep, applied.keep
        )


@pytest.mark.parametrize(
    ("statistic", "value"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + math.log(2)),
        ("exp_abs", 2),
        ("tv", 0.4),
        ("prob_diff", -0.4),
        ("trainer_prob", 0.4),
        ("binary_kl", 0.8 * math.log(2) + 0.2 * math.log(1 / 3)),
        (
            "binary_kl_sym",
            max(0.8 * math.log(2) + 0.2 * math.log(1 / 3), 0.4 * math.log(0.5) + 0.6 * math.log(3)),
        ),
    ],
)
def test_statistics_by_hand(statistic: str, value: float) -> None:
    """p_trainer = .4 and p_rollout = .8 give rho = 1/2."""
    old, rollout = torch.tensor([0.4]).log(), torch.tensor([0.8]).log()
    side = "low" if statistic in ("prob_diff", "trainer_prob") else "high"
    outside, within = (1, -1) if side == "low" else (-1, 1)
    for step, kept in ((outside, False), (within, True)):
        gate = Gate.model_validate({"statistic": statistic, side: value + step * 1e-4})
        assert reweight(old, rollout, ALL[:1], CorrectionConfig(gates=(gate,))).keep.tolist() == [
            kept
        ]


def test_k3_estimates_the_kl_from_rollout_to_trainer_b7() -> None:
    """p (trainer) = (.6, .4) and q (rollout) = (.9, .1) give E_q[k3] = KL(q || p) = .226289, not
    the other direction."""
    p, q = (
        torch.tensor([0.6, 0.4], dtype=torch.float64),
        torch.tensor([0.9, 0.1], dtype=torch.float64),
    )
    both = slots(p.log(), q.log(), ALL[:2])
    assert float(q @ statistic("k3", both)) == pytest.approx(0.226289, abs=1e-6)
    assert float(q @ statistic("k1", both)) == pytest.approx(0.226289, abs=1e-6)


def test_turns_are_units_of_their_own() -> None:
    """rho of the turns is (2, 2), (1/2, 1) and in the second sequence (3,)."""
    rho = torch.tensor([2, 2, 0.5, 1, 3])
    segment, turn = torch.tensor([0, 0, 0, 0, 1]), torch.tensor([0, 0, 1, 1, 0])
    weights = reweight(
        rho.log(),
        torch.zeros(5),
        ALL[:5],
        CorrectionConfig(weight=Weight(level="turn")),
        segment=segment,
        turn=turn,
    )
    assert weights.weight.tolist() == pytest.approx([4, 4, 0.5, 0.5, 3])
    gate = Gate(statistic="ratio", aggregate="max", scope="turn", high=2)
    kept = reweight(
        rho.log(),
        torch.zeros(5),
        ALL[:5],
        CorrectionConfig(gates=(gate,)),
        segment=segment,
        turn=turn,
    )
    assert kept.keep.tolist() == [True] * 4 + [False]
    with pytest.raises(UsageError, match="needs the `turn`"):
        reweight(
            rho.log(), torch.zeros(5), ALL[:5], CorrectionConfig(gates=(gate,)), segment=segment
        )


def test_gates_that_look_at_the_advantage() -> None:
    rho, advantage = torch.tensor([0.5, 0.5, 2, 2]), torch.tensor([1.0, -1, 1, -1])

    def kept(when: str, advantage: Tensor | None = advantage) -> list[bool]:
        gate = Gate.model_validate({"statistic": "ratio", "low": 0.8, "high": 1.25, "when": when})
        return reweight(
            rho.log(), torch.zeros(4), ALL[:4], CorrectionConfig(gates=(gate,)), advantage=advantage
        ).keep.tolist()

    assert kept("negative") == [True, False, True, False]
    assert kept("positive") == [False, True, False, True]
    assert kept("toward") == [
        True,
        False,
        False,
        True,
    ]  # only what moved the way its advantage asks for, as PPO's clip
    assert kept("toward", torch.zeros(4)) == [True] * 4
    with pytest.raises(UsageError, match="needs `advantage`"):
        kept("toward", None)


def test_a_sequence_gate_uses_the_sequences_mean_advantage() -> None:
    gate = Gate(statistic="k1", aggregate="mean", scope="sequence", when="negative", high=0.5)
    old, segment = torch.full((4,), -math.log(2)), torch.tensor([0, 0, 1, 1])
    advantage = torch.tensor([-3.0, 1, -1, 3])
    applied = reweight(
        old,
        torch.zeros(4),
        ALL[:4],
        CorrectionConfig(gates=(gate,)),
        segment=segment,
        advantage=advantage,
    )
    assert applied.keep.tolist() == [False, False, True, True]


def test_m2po_drops_the_largest_until_the_mean_fits() -> None:
    """k2 = .5, .125, .02, .02: the mean of the smallest three is .055, of two .02."""
    log_rho = torch.tensor([1.0, -0.5, 0.2, -0.2])
    gate = {"statistic": "k2", "aggregate": "budget", "high": 0.06}
    assert reweight(
        log_rho, torch.zeros(4), ALL[:4], preset("m2po", gates=[gate])
    ).keep.tolist() == [
        False,
        True,
        True,
        True,
    ]
    applied = reweight(
        log_rho, torch.zeros(4), ALL[:4], preset("m2po", gates=[gate | {"high": 0.021}])
    )
    assert applied.keep.tolist() == [False, False, True, True]
    ties = torch.tensor(
        [0.1, 0.3, -0.3, 0.3]
    )  # .005, .045 x 3: two of them would fit, equal values go together
    applied = reweight(
        ties, torch.zeros(4), ALL[:4], preset("m2po", gates=[gate | {"high": 0.032}])
    )
    assert applied.keep.tolist() == [True, False, False, False]
    assert not reweight(
        log_rho, torch.zeros(4), ALL[:4], preset("m2po", gates=[gate | {"high": 0.001}])
    ).keep.any()


@pytest.mark.parametrize("name", FIXED)
def test_engines_that_agree_weigh_exactly_one(name: str) -> None:
    logp = -torch.rand(20) * 20
    applied = reweight(logp, logp, ALL, preset(name), segment=torch.arange(20) // 7)
    assert (applied.weight == 1).all()
    assert applied.keep.all()
    assert applied.report["correction/weight_mean"] == 1


@pytest.mark.parametrize("name", FIXED)
def test_infinite_slots_are_rejected_and_counted(name: str) -> None:
    old = torch.tensor([0.0, math.nan, -math.inf, 0.0, -math.inf])
    rollout = torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf])
    config = preset(name, max_nonfinite=1.0)
    segment = torch.arange(5)
    applied = reweight(old, rollout, ALL[:5], config, segment=segment)
    assert applied.keep.tolist() == [True, False, False, False, False]
    assert applied.denominator == 5
    assert applied.report["correction/nonfinite"] == pytest.approx(0.8)
    alone = config.normalise == "self"  # the only kept slot carries the whole mean
    assert applied.weight.tolist() == pytest.approx([5 if alone else 1, 0, 0, 0, 0])
    nothing = reweight(
        torch.full((3,), math.nan), torch.zeros(3), ALL[:3], config, segment=torch.zeros(3).long()
    )
    assert nothing.weight.tolist() == [0, 0, 0]
    assert nothing.report["correction/rejected"] == 1
    assert math.isnan(nothing.report["correction/weight_max"])
    assert list(nothing.report) == list(
        applied.report
    )  # fixed names: ranks can be reduced position by position


def test_an_unknown_token_makes_its_sequence_unknown() -> None:
    """A product or mean over a sequence has no value if one of its ratios has none. Token weights
    lose one slot."""
    old = torch.tensor([0.0, math.nan, 0.0, 0.0])
    segment = torch.tensor([0, 0, 1, 1])
    for name in ("seq-tis", "geo-rs", "veto", "trm"):
        applied = reweight(
            old, torch.zeros(4), ALL[:4], preset(name, max_nonfinite=1.0), segment=segment
        )
        assert applied.keep.tolist() == [False, False, True, True], name
    assert reweight(old, torch.zeros(4), ALL[:4], preset("tis", max_nonfinite=1.0)).keep.sum() == 3


def test_too_many_bad_slots_are_an_error() -> None:
    old = torch.tensor([math.nan] + [0.0] * 9)
    assert reweight(old, torch.zeros(10), ALL[:10], preset("tis")).keep.sum() == 9
    with pytest.raises(UsageError, match=r"not finite on 10.0% of the slots.*max_nonfinite = 0.05"):
        reweight(old, torch.zeros(10), ALL[:10], preset("tis", max_nonfinite=0.05))


def test_the_receipt_by_hand() -> None:
    report = apply(preset("tis", weight={"high": 3.0})).report
    mean = 10.25 / 6
    expected = {
        "slots": 6,
        "kept": 6,
        "denominator": 6,
        "rejected": 0,
        "nonfinite": 0,
        "weighted": 4 / 6,
        "clipped": 1 / 6,
        "scale": 1,
        "weight_mean": 9.25 / 6,
        "weight_min": 0.25,
        "weight_max": 3,
        "weight_ess": 9.25**2 / (6 * 19.0625),
        "ratio_mean": mean,
        "ratio_max": 4,
        "ratio_ess": 10.25**2 / (6 * 26.0625),
    }
    assert {name: report[f"correction/{name}"] for name in expected} == pytest.approx(expected)
    assert report["correction/ratio_q01"] == pytest.approx(0.25, rel=0.02)
    assert report["correction/ratio_q50"] == 1
    assert report["correction/ratio_q99"] == pytest.approx(4, rel=0.02)
    assert report["correction/weight_q99"] == pytest.approx(3, rel=0.02)
    icepop = apply(preset("icepop", weight={"high": 2.0})).report
    assert icepop["correction/rejected/weight"] == pytest.approx(2 / 6)
    assert icepop["correction/clipped"] == 0


def test_a_huge_finite_ratio_is_capped_not_overflowed() -> None:
    applied = reweight(torch.zeros(2), torch.tensor([-1e30, 0.0]), ALL[:2], preset("tis"))
    assert applied.weight.tolist() == [2, 1]
    assert math.isfinite(applied.report["correction/ratio_max"])


def test_weights_carry_no_gradient() -> None:
    assert not reweight(
        torch.zeros(2, requires_grad=True), torch.zeros(2), ALL[:2], preset("tis")
    ).weight.requires_grad


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="selects none of 6 slots"):
        reweight(torch.zeros(6), torch.zeros(6), ~ALL[:6], preset("tis"))
    with pytest.raises(UsageError, match="one shape"):
        reweight(torch.zeros(6), torch.zeros(5), ALL[:6], preset("tis"))
    with pytest.raises(UsageError, match="mask bool"):
        reweight(torch.zeros(6), torch.zeros(6), ALL[:6].long(), preset("tis"))
    with pytest.raises(UsageError, match="segment has shape"):
        reweight(
            torch.zeros(6), torch.zeros(6), ALL[:6], preset("tis"), segment=torch.zeros(5).long()
        )
    with pytest.raises(UsageError, match="sequence needs the `segment`"):
        reweight(torch.zeros(6), torch.zeros(6), ALL[:6], preset("geo-rs"))
    with pytest.raises(
        UsageError, match="opsm needs the ratio of the policy that is being trained"
    ):
        reweight(torch.zeros(6), torch.zeros(6), ALL[:6], preset("opsm"))
