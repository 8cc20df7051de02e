"""Weights and gates against closed forms by hand (B0, B2, B3), bad slots, the statistics."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, Gate, UsageError, Weight
from onepolicy.config.presets import correction_presets
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import Applied, reweight, slots
from onepolicy.correct.statistics import statistic

# B0: two sequences; the last two slots of the second are masked and hold garbage
RHO = torch.tensor([1, 4, 1 / 4, 1, 2, 2, math.nan, 1e9], dtype=torch.float64)
SEGMENT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
MASK = torch.tensor([True] * 6 + [False] * 2)
FIXED = [name for name in correction_presets() if not preset(name).live]
ALL = torch.ones(20, dtype=torch.bool)


def apply(config, rho=RHO, mask=MASK, segment=SEGMENT, **more):
    """Correct rollout log-probabilities that are not all the same: the ratio alone counts."""
    rollout = -torch.linspace(9, 10, len(rho), dtype=torch.float64)
    return reweight(rho.log() + rollout, rollout, mask, config, segment=segment, **more)


def compare(log_rho, config, **more):
    """Apply the correction to the log-ratios of slots that are all trainable."""
    return reweight(log_rho, torch.zeros(len(log_rho)), ALL[: len(log_rho)], config, **more)


def gated(gate: Gate) -> CorrectionConfig:
    return CorrectionConfig(gates=(gate,))


def token_mean(applied: Applied[Tensor]) -> float:
    return float(applied.weight.double().sum() / applied.denominator)


def sequence_mean(applied: Applied[Tensor]) -> float:
    """Return the mean over sequences of their token means, by the original lengths."""
    first, second = applied.weight.double().split(4)
    return float((first.sum() / 4 + second.sum() / 2) / 2)


def one_gate(statistic: str, aggregate: str, **bound: float) -> dict:
    gate = {"statistic": statistic, "aggregate": aggregate, "scope": "sequence"}
    return {"gates": [gate | bound]}


PRODUCT_1 = preset("seq-mis", **one_gate("ratio", "sum", high=2.0))
K3_HALF = preset("k3-rs", **one_gate("k3", "mean", high=0.5))
VETO_TIS = preset("tis", **one_gate("ratio", "min", low=0.3))
WIDE = preset("miles-moe-wide", normalise="none")
GEOMETRIC = CorrectionConfig(weight=Weight(level="geometric"))
B0 = {  # config, its token mean, sequence mean, mean of the kept weights and effective sample size
    "recompute": (preset("recompute"), 1, 1, 1, 1),
    "vanilla-is": (preset("vanilla-is"), 1.708333, 1.78125, 1.708333, 0.6719),
    "tis": (preset("tis"), 1.375, 1.53125, 1.375, 0.8067),
    "cis": (preset("cis"), 1.416667, 1.5625, 1.416667, 0.8450),
    "icepop .5 2": (preset("icepop", weight={"high": 2.0}), 1.0, 1.25, 1.5, 0.6),
    "mis without snis": (preset("mis", normalise="none"), 1.0, 1.25, 1.5, 0.6),
    "icepop .5 5": (preset("icepop"), 1.666667, 1.75, 2.0, 0.6410),
    "seq-tis": (preset("seq-tis"), 1.333333, 1.5, 1.333333, 0.8889),
    "geometric": (GEOMETRIC, 1.333333, 1.5, 1.333333, 0.8889),
    "seq-mis, product 1": (PRODUCT_1, 0.666667, 0.5, 1.0, 0.6667),
    "seq-mis": (preset("seq-mis"), 0.666667, 0.5, 1.0, 0.6667),
    "geo-rs": (preset("geo-rs"), 0.666667, 0.5, 1.0, 0.6667),
    "trl-default": (preset("trl-default"), 0.666667, 0.5, 1.0, 0.6667),
    "seq-mask-tis": (preset("seq-mask-tis"), 1.041667, 0.78125, 1.5625, 0.3604),
    "geo-rs-token-tis": (preset("geo-rs-token-tis"), 0.708333, 0.53125, 1.0625, 0.4966),
    "miles-moe": (preset("miles-moe"), 0.666667, 0.5, 1.0, 0.5926),
    "miles-moe-wide without snis": (WIDE, 0.75, 0.5625, 1.125, 0.54),
    "miles-moe-tis": (preset("miles-moe-tis"), 1.166667, 1.25, 1.166667, 0.9074),
    "k3-rs .5": (K3_HALF, 0.333333, 0.5, 1.0, 0.3333),
    "veto .3 + tis": (VETO_TIS, 0.666667, 1.0, 2.0, 0.3333),
}


def test_closed_forms_b0(subtests) -> None:
    """Products of the sequences are 1 and 4, geometric means 1 and 2, k3 .5625 and .306853."""
    for name, (config, tokens, sequences, kept, ess) in B0.items():
        with subtests.test(name):
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


def test_self_normalised_unit_losses_give_one(subtests) -> None:
    for name, (config, *_) in B0.items():
        if not config.rejects and config.weight.level == "none":
            continue
        normalised = config.model_copy(update={"normalise": "self"})
        with subtests.test(name):
            assert token_mean(apply(normalised)) == pytest.approx(1, abs=1e-6)
            by_sequence = apply(normalised, average="sequences")
            assert sequence_mean(by_sequence) == pytest.approx(1, abs=1e-6)


def test_self_normalised_icepop_on_one_sequence() -> None:
    """mis.py, which divides by a mean that includes the rejected weights, gives .64 for both."""
    config = preset("icepop", weight={"high": 2.0}, normalise="self")
    applied = apply(config, RHO[:4], MASK[:4], SEGMENT[:4])
    assert applied.weight.tolist() == pytest.approx([2, 0, 0, 2])
    assert applied.report["correction/scale"] == pytest.approx(2)


def test_gates_in_any_order_b2() -> None:
    """Each gate sees the original mask: the geometric mean .316 rejects the good tokens too."""
    rho = torch.tensor([1, 1, 1, 0.01], dtype=torch.float64)
    geo = Gate(statistic="ratio", aggregate="mean", scope="sequence", low=0.99, high=1.01)
    gates = (Gate(statistic="ratio", low=0.5, high=2), geo, Gate(statistic="k3", high=5))
    for order in permutations(gates):
        applied = apply(CorrectionConfig(gates=order), rho, ALL[:4], SEGMENT[:4])
        assert not applied.keep.any()
        assert applied.report["correction/rejected/ratio.token"] == 0.25
        assert applied.report["correction/rejected/ratio.mean.sequence"] == 1
        assert applied.report["correction/rejected/k3.token"] == 0


def test_bounds_are_inclusive_and_on_rho_b3() -> None:
    rho = torch.tensor([0.3, 0.6, 1, 1.3, 1.9, 3])
    for low, high, kept in (
        (0.6, 1.4, [0.6, 1, 1.3]),
        (0.1, 1.2, [0.3, 0.6, 1]),
        (None, 1.3, [0.3, 0.6, 1, 1.3]),
        (0.6, None, [0.6, 1, 1.3, 1.9, 3]),
    ):
        zero = CorrectionConfig(weight=Weight(level="token", low=low, high=high, outside="zero"))
        for values in (rho, rho.double()):
            applied = compare(values.log(), gated(Gate(statistic="ratio", low=low, high=high)))
            assert values[applied.keep].tolist() == pytest.approx(kept)
            assert torch.equal(compare(values.log(), zero).keep, applied.keep)


KL = 0.8 * math.log(2) + 0.2 * math.log(1 / 3)
BY_HAND = {  # p_trainer = .4 and p_rollout = .8 give rho = 1/2
    "k1": math.log(2),
    "k2": math.log(2) ** 2 / 2,
    "k3": 0.5 - 1 + math.log(2),
    "exp_abs": 2,
    "tv": 0.4,
    "prob_diff": -0.4,
    "trainer_prob": 0.4,
    "binary_kl": KL,
    "binary_kl_sym": max(KL, 0.4 * math.log(0.5) + 0.6 * math.log(3)),
}


def test_statistics_by_hand(subtests) -> None:
    old, rollout = torch.tensor([0.4]).log(), torch.tensor([0.8]).log()
    for name, value in BY_HAND.items():
        side, outside = "high", -1e-4
        if name in ("prob_diff", "trainer_prob"):
            side, outside = "low", 1e-4
        with subtests.test(name):
            for step, kept in ((outside, False), (-outside, True)):
                gate = Gate.model_validate({"statistic": name, side: value + step})
                assert reweight(old, rollout, ALL[:1], gated(gate)).keep.tolist() == [kept]


def test_k3_estimates_the_kl_from_rollout_to_trainer_b7() -> None:
    """Trainer p = (.6, .4) and rollout q = (.9, .1) give E_q[k3] = KL(q || p) = .226289."""
    p, q = torch.tensor([[0.6, 0.4], [0.9, 0.1]], dtype=torch.float64)
    both = slots(p.log(), q.log(), ALL[:2])
    assert float(q @ statistic("k3", both)) == pytest.approx(0.226289, abs=1e-6)
    assert float(q @ statistic("k1", both)) == pytest.approx(0.226289, abs=1e-6)


def test_gates_that_look_at_the_advantage() -> None:
    rho, advantage = torch.tensor([0.5, 0.5, 2, 2]), torch.tensor([1.0, -1, 1, -1])

    def kept(when, advantage=advantage):
        gate = Gate.model_validate({"statistic": "ratio", "low": 0.8, "high": 1.25, "when": when})
        return compare(rho.log(), gated(gate), advantage=advantage).keep.tolist()

    assert kept("negative") == [True, False, True, False]
    assert kept("positive") == [False, True, False, True]
    # only what moved the way its advantage asks for, as PPO's clip
    assert kept("toward") == [True, False, False, True]
    assert kept("toward", torch.zeros(4)) == [True] * 4
    with pytest.raises(UsageError, match="needs `advantage`"):
        kept("toward", None)


def test_a_sequence_gate_uses_the_sequences_mean_advantage() -> None:
    gate = Gate(statistic="k1", aggregate="mean", scope="sequence", when="negative", high=0.5)
    old, segment = torch.full((4,), -math.log(2)), torch.tensor([0, 0, 1, 1])
    advantage = torch.tensor([-3.0, 1, -1, 3])
    applied = compare(old, gated(gate), segment=segment, advantage=advantage)
    assert applied.keep.tolist() == [False, False, True, True]


def test_m2po_drops_the_largest_until_the_mean_fits() -> None:
    """k2 = .5, .125, .02, .02: the mean of the smallest three is .055, of two .02."""
    log_rho = torch.tensor([1.0, -0.5, 0.2, -0.2])
    # .005, .045 x 3: two of them would fit, equal values go together
    ties = torch.tensor([0.1, 0.3, -0.3, 0.3])
    for values, most, kept in (
        (log_rho, 0.06, [False, True, True, True]),
        (log_rho, 0.021, [False, False, True, True]),
        (log_rho, 0.001, [False] * 4),
        (ties, 0.032, [True, False, False, False]),
    ):
        gate = {"statistic": "k2", "aggregate": "budget", "high": most}
        assert compare(values, preset("m2po", gates=[gate])).keep.tolist() == kept


def test_engines_that_agree_weigh_exactly_one() -> None:
    logp = -torch.rand(20) * 20
    for name in FIXED:
        applied = reweight(logp, logp, ALL, preset(name), segment=torch.arange(20) // 7)
        assert (applied.weight == 1).all(), name
        assert applied.keep.all(), name
        assert applied.report["correction/weight_mean"] == 1, name


def test_infinite_slots_are_rejected_and_counted(subtests) -> None:
    old = torch.tensor([0.0, math.nan, -math.inf, 0.0, -math.inf])
    rollout = torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf])
    for name in FIXED:
        with subtests.test(name):
            config = preset(name, max_nonfinite=1.0)
            applied = reweight(old, rollout, ALL[:5], config, segment=torch.arange(5))
            assert applied.keep.tolist() == [True, False, False, False, False]
            assert applied.denominator == 5
            assert applied.report["correction/nonfinite"] == pytest.approx(0.8)
            weight = 1
            if config.normalise == "self":
                weight = 5  # one slot carries the whole mean
            assert applied.weight.tolist() == pytest.approx([weight, 0, 0, 0, 0])
            nothing = compare(torch.full((3,), math.nan), config, segment=torch.zeros(3).long())
            assert nothing.weight.tolist() == [0, 0, 0]
            assert nothing.report["correction/rejected"] == 1
            assert math.isnan(nothing.report["correction/weight_max"])
            # fixed names: ranks can be reduced position by position
            assert list(nothing.report) == list(applied.report)


def test_an_unknown_token_makes_its_sequence_unknown() -> None:
    """A product or mean over a sequence has no value if one of its ratios has none."""
    old = torch.tensor([0.0, math.nan, 0.0, 0.0])
    segment = torch.tensor([0, 0, 1, 1])
    for name in ("seq-tis", "geo-rs", "veto", "trm"):
        applied = compare(old, preset(name, max_nonfinite=1.0), segment=segment)
        assert applied.keep.tolist() == [False, False, True, True], name
    assert compare(old, preset("tis", max_nonfinite=1.0)).keep.sum() == 3


def test_too_many_bad_slots_are_an_error() -> None:
    old = torch.tensor([math.nan] + [0.0] * 9)
    assert compare(old, preset("tis")).keep.sum() == 9
    with pytest.raises(UsageError, match=r"not finite on 10.0% of the slots.*max_nonfinite = 0.05"):
        compare(old, preset("tis", max_nonfinite=0.05))


def test_the_receipt_by_hand() -> None:
    report = apply(preset("tis", weight={"high": 3.0})).report
    expected = {"slots": 6, "kept": 6, "denominator": 6, "rejected": 0, "nonfinite": 0}
    expected |= {"weighted": 4 / 6, "clipped": 1 / 6, "scale": 1, "weight_mean": 9.25 / 6}
    expected |= {"weight_min": 0.25, "weight_max": 3, "weight_ess": 9.25**2 / (6 * 19.0625)}
    expected |= {"ratio_mean": 10.25 / 6, "ratio_max": 4, "ratio_ess": 10.25**2 / (6 * 26.0625)}
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
    assert not compare(torch.zeros(2, requires_grad=True), preset("tis")).weight.requires_grad


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="selects none of 6 slots"):
        reweight(torch.zeros(6), torch.zeros(6), ~ALL[:6], preset("tis"))
    with pytest.raises(UsageError, match=r"sequence needs the `segment`.*with \[T\] segment="):
        compare(torch.zeros(6), preset("geo-rs"))
    gate = Gate(statistic="ratio", aggregate="max", scope="turn", high=2)
    with pytest.raises(UsageError, match="needs the `turn`"):
        compare(torch.zeros(6), gated(gate), segment=torch.zeros(6).long())
