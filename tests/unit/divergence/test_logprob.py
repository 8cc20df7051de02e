"""Mismatch statistics: hand-computed cases, invariances, and refusal of bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.divergence.logprob import mismatch
from support.examples import examples

LOGP = st.floats(min_value=-30, max_value=0, allow_nan=False, width=32)
PAIRS = st.lists(st.tuples(LOGP, LOGP), min_size=1, max_size=20)


def two_samples() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return two samples, of ratios 1, 4, 1/4, 1, and 2, 2 and two masked slots of garbage."""
    ratios = torch.tensor([1, 4, 1 / 4, 1, 2, 2, math.nan, math.inf], dtype=torch.float64)
    rollout = torch.tensor([0] * 6 + [-math.inf, 1e9], dtype=torch.float64)
    return ratios.log(), rollout, torch.arange(8) < 6, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])


def compare(old: Tensor, rollout: Tensor, **more):
    """Compare slots that are all trainable."""
    return mismatch(old, rollout, torch.ones(len(old), dtype=torch.bool), **more)


def test_two_samples_by_hand() -> None:
    old, rollout, mask, segment = two_samples()
    m = mismatch(old, rollout, mask, segment=segment)
    assert m.tokens == 6
    assert m.k1 == pytest.approx(-2 * math.log(2) / 6)  # -0.231049
    assert m.k3 == pytest.approx(10.25 / 6 - 1 - 2 * math.log(2) / 6)  # 0.477284
    assert m.chi2 == pytest.approx(3.34375)
    assert m.ess == pytest.approx(10.25**2 / (6 * 26.0625))  # 0.6719
    assert m.ppl_ratio == pytest.approx(0.75)  # geometric means of rho: 1 and 2
    assert m.mean_dlogp == pytest.approx((2 * math.log(4) + 2 * math.log(2)) / 6)
    assert m.max_dlogp == pytest.approx(math.log(4))
    assert m.extreme([1.5, 2, 4, 1]) == pytest.approx([4 / 6, 2 / 6, 0, 4 / 6])
    assert m.extreme(2) == pytest.approx(2 / 6)  # strict: two tokens at exactly 2 are not beyond
    assert m.f2 == m.extreme(2)


def test_probabilities_by_hand() -> None:
    old, rollout = torch.tensor([0.5, 0.25, 0.9]), torch.tensor([0.4, 0.35, 0.9])
    m = compare(old.log(), rollout.log())
    assert m.max_dp == pytest.approx(0.1, abs=1e-6)
    assert m.mean_dp == pytest.approx(0.2 / 3, abs=1e-6)
    correlation = torch.corrcoef(torch.stack([old, rollout]))[0, 1]
    assert m.pearson == pytest.approx(correlation.item(), abs=1e-6)
    assert m.ppl_ratio == pytest.approx((0.4 * 0.35 / (0.5 * 0.25)) ** (1 / 3))  # one sample


def test_pearson_of_constants() -> None:
    for old, rollout, expected in (
        ([-0.7] * 7, [-0.7] * 7, 1.0),
        ([-0.7] * 7, [-2.1] * 7, math.nan),
        # exp(-.7) seven times has a rounded mean: deviations are not 0
        ([-0.7] * 7, [-0.7] * 6 + [-2.1], math.nan),
    ):
        found = compare(torch.tensor(old), torch.tensor(rollout)).pearson
        assert found == pytest.approx(expected, nan_ok=True)


def test_metrics_have_the_documented_keys() -> None:
    old, rollout, mask, segment = two_samples()
    m = mismatch(old, rollout, mask, segment=segment)
    metrics = m.metrics()
    names = "k1 k3 differing f1.25 f2 f5 chi2 ess max_dp mean_dp max_dlogp mean_dlogp pearson"
    names += " ppl_ratio"
    assert set(metrics) == {f"mismatch/{name}" for name in names.split()}
    assert metrics["mismatch/f2"] == m.extreme(2)
    assert metrics["mismatch/f1.25"] == m.extreme(1.25)
    assert set(m.metrics("other")) == {f"other/{name}" for name in names.split()}


@given(PAIRS)
@examples(60)
def test_permuting_and_interleaving_garbage_changes_nothing(pairs) -> None:
    # Differences of one rounding leave a correlation that is rounding, too: the order of the sum
    # decides it.
    old, rollout = torch.tensor(pairs).T.mul(2**10).round() / 2**10
    n = len(pairs)
    plain = compare(old, rollout, segment=torch.zeros(n).long())
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    wide_old, wide_rollout = torch.full((2 * n,), math.nan), torch.full((2 * n,), math.inf)
    wide_old[::2], wide_rollout[::2] = old[order], rollout[order]
    even, seven = torch.arange(2 * n) % 2 == 0, torch.full((2 * n,), 7)
    wide = mismatch(wide_old, wide_rollout, even, segment=seven)
    assert wide.metrics() == pytest.approx(plain.metrics(), rel=1e-9, abs=1e-12, nan_ok=True)


@given(PAIRS)
@examples(60)
def test_bounds_and_extreme_against_brute_force(pairs) -> None:
    old, rollout = torch.tensor(pairs).T
    m = compare(old, rollout)
    assert m.k3 >= -1e-15
    assert 0 < m.ess <= 1 + 1e-12
    gaps = (old.double() - rollout.double()).abs().tolist()
    taus = [1.0, 1.25, 2.0, 5.0, 1e6]
    shares = [sum(gap > math.log(tau) for gap in gaps) / len(gaps) for tau in taus]
    assert m.extreme(taus) == pytest.approx(shares)
    assert m.extreme(taus) == [m.extreme(tau) for tau in taus]


def test_same_policy_has_no_mismatch() -> None:
    logp = -torch.rand(50) * 9
    m = compare(logp, logp, segment=torch.arange(50) // 10)
    assert (m.k1, m.k3, m.chi2, m.max_dp, m.max_dlogp, m.differing) == (0,) * 6
    assert (m.ess, m.pearson, m.ppl_ratio, m.extreme(1.0)) == (1, 1, 1, 0)


def test_differing_counts_any_bit() -> None:
    """Two masked-in slots differ, one of them by the last bit. A third difference is masked out."""
    old = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    rollout = torch.tensor([-1.0, torch.tensor(-2.0).nextafter(torch.tensor(0.0)), -3.5, -4.5])
    m = mismatch(old, rollout, torch.tensor([True, True, True, False]))
    assert (m.differing, m.tokens) == (2, 3)


def test_a_huge_ratio_leaves_ess_finite() -> None:
    m = compare(torch.tensor([0.0, 0.0]), torch.tensor([-2000.0, 0.0]))
    assert m.ess == pytest.approx(0.5)  # one token carries all the weight
    assert m.chi2 == math.inf


def test_reads_without_touching_the_graph() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    m = compare(old, torch.tensor([-1.0, -1.0]))
    assert not m.abs_log_ratio.requires_grad
    assert m.abs_log_ratio.tolist() == [0, 1]


def test_bad_input_is_refused() -> None:
    fine, mask = torch.zeros(4), torch.ones(4, dtype=torch.bool)
    for call, words in (
        (lambda: mismatch(fine, fine, ~mask), "selects none of 4 slots"),
        (lambda: mismatch(fine, fine, mask).extreme(0.5), r"tau = 0\.5"),
        (lambda: mismatch(None, fine, mask), "logp_old is NoneType"),
        (lambda: mismatch(fine, None, mask), "logp_rollout is NoneType"),
        (lambda: mismatch(fine, fine, None), "mask is NoneType"),
        (lambda: mismatch(fine, fine, mask, segment="0011"), "segment is str"),
    ):
        with pytest.raises(UsageError, match=words):
            call()


def test_divergences_with_misleading_names():
    """AReaL's k3 and NeMo-RL's policy_kl_error by their formulas. Rollout q and trainer p are over
    two symbols, drawn from q in proportion, so means are expectations."""
    q, p = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    drawn = torch.tensor([0] * 8 + [1] * 2)
    found = compare(p.log()[drawn], q.log()[drawn])
    kl = float((q * (q / p).log()).sum())
    assert (found.k1, found.k3) == pytest.approx((kl, kl))  # both estimate KL(rollout || trainer)
    rho = (p / q)[drawn]
    areal = float((1 / rho - 1 + rho.log()).mean())
    assert areal == pytest.approx(float((q**2 / p).sum() - 1) - kl)  # chi2(q || p) - KL(q || p)
    # k3 with the sides swapped, drawn from q all the same
    nemo = float((1 / rho - 1 - (1 / rho).log()).mean())
    assert nemo == pytest.approx(areal)
    reverse = float((p * (p / q).log()).sum())  # KL(trainer || rollout), and what it takes
    assert float((rho * rho.log() - rho + 1).mean()) == pytest.approx(reverse)
    assert abs(nemo - reverse) > 0.04
    assert found.chi2 == pytest.approx(float((p**2 / q).sum() - 1))
