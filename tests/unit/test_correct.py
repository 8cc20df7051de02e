"""Importance weights: hand-computed numbers, what is rejected, and the presets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import TIS, CorrectionConfig, CorrectionOff, UsageError
from onepolicy.correct.presets import preset
from onepolicy.correct.weights import reweight

LOGP = st.floats(-30, 0, width=32)
RATIOS = torch.tensor([1, 4, 1 / 4, 1, 2, 2])
MASK = torch.ones(6, dtype=torch.bool)
BOTH = pytest.mark.parametrize("config", [CorrectionOff(), TIS(cap=2.0)], ids=["off", "tis"])


def test_tis_by_hand() -> None:
    applied = reweight(RATIOS.log(), torch.zeros(6), MASK, TIS(cap=2.0))
    assert applied.weight.tolist() == pytest.approx([1, 2, 0.25, 1, 2, 2])
    assert applied.weight.dtype == torch.float32
    assert applied.keep.tolist() == [True] * 6
    assert applied.denominator == 6
    report = applied.report
    assert report["correction/weight_mean"] == pytest.approx(1.375)
    assert report["correction/weight_min"] == pytest.approx(0.25)
    assert report["correction/weight_max"] == pytest.approx(2)
    assert report["correction/ratio_mean"] == pytest.approx(10.25 / 6)
    assert report["correction/ratio_max"] == pytest.approx(4)
    assert report["correction/ratio_ess"] == pytest.approx(10.25**2 / (6 * 26.0625))  # .6719
    assert report["correction/weight_ess"] == pytest.approx(8.25**2 / (6 * 14.0625))  # .8067
    assert report["correction/rejected"] == 0
    loose = reweight(RATIOS.log(), torch.zeros(6), MASK, TIS(cap=3.0))
    assert loose.report["correction/capped"] == pytest.approx(1 / 6)
    assert loose.weight.tolist() == pytest.approx([1, 3, 0.25, 1, 2, 2])


def test_off_weighs_nothing_but_reports_the_raw_ratio() -> None:
    applied = reweight(RATIOS.log(), torch.zeros(6), MASK, CorrectionOff())
    assert applied.weight.tolist() == [1] * 6
    assert applied.report["correction/weight_mean"] == 1
    assert applied.report["correction/weight_ess"] == 1
    assert applied.report["correction/capped"] == 0
    assert applied.report["correction/ratio_max"] == pytest.approx(4)


def test_the_ratio_is_trainer_over_rollout() -> None:
    applied = reweight(torch.tensor([math.log(0.2)]), torch.tensor([math.log(0.8)]), MASK[:1], TIS(cap=2.0))
    assert applied.weight.tolist() == pytest.approx([0.25])


@BOTH
def test_engines_that_agree_weigh_exactly_one(config: CorrectionConfig) -> None:
    logp = -torch.rand(100) * 20
    applied = reweight(logp, logp, torch.ones(100, dtype=torch.bool), config)
    assert (applied.weight == 1).all()
    assert reweight(logp, logp, torch.ones(100, dtype=torch.bool), TIS(cap=1.0)).report["correction/capped"] == 0


@BOTH
def test_non_finite_slots_are_rejected_and_counted(config: CorrectionConfig) -> None:
    old = torch.tensor([0.0, math.nan, -math.inf, 0.0, -math.inf])
    rollout = torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf])
    applied = reweight(old, rollout, torch.ones(5, dtype=torch.bool), config)
    assert applied.keep.tolist() == [True, False, False, False, False]
    assert applied.weight.tolist() == [1, 0, 0, 0, 0]
    assert applied.denominator == 5  # rejection never makes the surviving slot louder
    assert applied.report["correction/rejected"] == pytest.approx(0.8)
    assert applied.report["correction/weight_mean"] == pytest.approx(0.2)


@BOTH
def test_everything_rejected(config: CorrectionConfig) -> None:
    applied = reweight(torch.full((3,), math.nan), torch.zeros(3), torch.ones(3, dtype=torch.bool), config)
    assert not applied.keep.any()
    assert applied.weight.tolist() == [0, 0, 0]
    assert applied.report["correction/rejected"] == 1
    assert math.isnan(applied.report["correction/weight_max"])


@BOTH
def test_report_keys_do_not_depend_on_the_data(config: CorrectionConfig) -> None:
    """Fixed keys: ranks and steps can be reduced position by position."""
    names = [
        "weight_mean",
        "weight_min",
        "weight_max",
        "capped",
        "rejected",
        "ratio_mean",
        "ratio_max",
        "ratio_ess",
        "weight_ess",
    ]
    for old in (torch.zeros(2), torch.full((2,), math.nan)):
        report = reweight(old, torch.zeros(2), torch.ones(2, dtype=torch.bool), config).report
        assert list(report) == [f"correction/{name}" for name in names]


@given(
    st.lists(
        st.tuples(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32), st.booleans()), min_size=1, max_size=20
    ),
    st.floats(0.5, 10),
)
@settings(max_examples=80, deadline=None)
def test_weights_are_bounded_masked_and_blind_to_garbage(rows: list[tuple[float, float, bool]], cap: float) -> None:
    old, rollout = torch.tensor([row[:2] for row in rows]).T
    mask = torch.tensor([row[2] for row in rows])
    mask[0] = True
    applied = reweight(old, rollout, mask, TIS(cap=cap))
    rho = (old.double() - rollout.double()).exp()
    torch.testing.assert_close(applied.weight.double()[mask], rho.clamp(max=cap)[mask], rtol=1e-6, atol=0)
    assert (applied.weight[~mask] == 0).all()
    assert torch.equal(applied.keep, mask)
    for garbage in (math.nan, math.inf, 1e9):
        dirty = reweight(old.masked_fill(~mask, garbage), rollout.masked_fill(~mask, -garbage), mask, TIS(cap=cap))
        assert torch.equal(dirty.weight, applied.weight)
        assert dirty.report == applied.report


def test_a_huge_finite_ratio_is_capped_not_overflowed() -> None:
    applied = reweight(torch.zeros(2), torch.tensor([-1e30, 0.0]), MASK[:2], TIS(cap=2.0))
    assert applied.weight.tolist() == [2, 1]
    assert math.isfinite(applied.report["correction/ratio_max"])


def test_weights_carry_no_gradient() -> None:
    assert not reweight(torch.zeros(2, requires_grad=True), torch.zeros(2), MASK[:2], TIS()).weight.requires_grad


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match="selects none of 6 slots"):
        reweight(torch.zeros(6), torch.zeros(6), ~MASK, TIS())
    with pytest.raises(UsageError, match="one shape"):
        reweight(torch.zeros(6), torch.zeros(5), MASK, TIS())
    with pytest.raises(UsageError, match="mask bool"):
        reweight(torch.zeros(6), torch.zeros(6), MASK.long(), TIS())


def test_presets() -> None:
    assert preset("off") == CorrectionOff()
    assert preset("tis") == TIS(cap=2.0)
    assert preset("tis", cap=3.0) == TIS(cap=3.0)
    assert preset("tis") == TIS(cap=2.0)  # the override did not stick
    with pytest.raises(UsageError, match="'tsi'; there are off, tis"):
        preset("tsi")
    with pytest.raises(UsageError, match=r"cpa=3.*settings are kind, cap"):
        preset("tis", cpa=3)
    with pytest.raises(UsageError, match="cap=-1"):
        preset("tis", cap=-1)
