"""Distances of distributions from their likeliest tokens: by hand, and as bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.divergence.distribution import distances
from support.examples import examples


def of(p, q, top):
    """Compute the distance. p: trainer, q: rollout, each [V] or [n, V]."""
    p, q = (torch.atleast_2d(torch.tensor(x, dtype=torch.float64)) for x in (p, q))
    logp_rollout, ids = q.log().topk(top)
    trainer_top_logp, trainer_top_ids = p.log().topk(top)
    return distances(ids, logp_rollout, p.log().gather(-1, ids), trainer_top_ids, trainer_top_logp)


def test_by_hand():
    """H = {0, 1}: inside |.1| + |-.1|, outside .2 on each side: TV between .1 and .3."""
    found = of([0.5, 0.3, 0.1, 0.1], [0.4, 0.41, 0.09, 0.1], 2)
    assert found.tv_low.item() == pytest.approx((0.1 + 0.11 + 0.01) / 2)
    assert found.tv_high.item() == pytest.approx((0.1 + 0.11 + 0.2 + 0.19) / 2)
    assert (found.mass_rollout.item(), found.mass_trainer.item()) == pytest.approx((0.81, 0.8))
    q, p = 0.41 / 0.81, 0.3 / 0.8
    shared = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    outside = 0.81 * math.log(0.81 / 0.8) + 0.19 * math.log(0.19 / 0.2)
    assert found.kl_shared.item() == pytest.approx(shared)
    assert found.kl_low.item() == pytest.approx(0.81 * shared + outside)
    assert found.argmax_differs.tolist() == [True]
    assert found.overlap.tolist() == [1.0]


def test_tails_without_a_common_token_reach_the_upper_bound():
    found = of([0.5, 0.3, 0.0, 0.2], [0.4, 0.4, 0.2, 0.0], 2)
    assert (found.tv_low.item(), found.tv_high.item()) == pytest.approx((0.1, 0.3))


def test_equal_engines_are_at_no_distance():
    logp = torch.randn(50, 1000).log_softmax(-1)
    best, ids = logp.topk(20)
    found = distances(ids, best, best, ids, best).metrics()
    assert found["tv_low"] == found["kl_low"] == found["kl_shared"] == found["argmax_differs"] == 0
    assert 0 < found["tv_high"] == pytest.approx(1 - found["mass_rollout"])
    assert found["overlap"] == 1


def test_arg_max_and_ties():
    for p, q, top, differs in (
        ([0.4, 0.35, 0.25], [0.45, 0.3, 0.25], 1, False),
        # the trainer's best is not among the rollout's 1
        ([0.4, 0.35, 0.25], [0.3, 0.45, 0.25], 1, True),
        ([0.4, 0.35, 0.25], [0.4, 0.4, 0.2], 2, False),  # the rollout ties
        ([0.4, 0.4, 0.2], [0.3, 0.45, 0.25], 2, False),  # the trainer does
    ):
        found = of(p, q, top)
        assert found.argmax_differs.tolist() == [differs], (p, q)
        assert found.overlap.shape == (1,)


def test_overlap_is_of_each_position():
    ids, own = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 5], [1, 2]])
    logp = torch.tensor([[-0.5, -2.0]] * 2)
    assert distances(ids, logp, logp, own, logp).overlap.tolist() == [0.5, 0.0]


def test_overlap_counts_what_sampling_can_draw():
    """Of H = {0, 1, 2, 3} top-k 2 leaves 0 and 1; the trainer has 1 of these, and 2 and 3."""
    ids, own = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[1, 2, 3, 5]])
    logp = torch.tensor([[-0.5, -0.9, -math.inf, -math.inf]])
    assert distances(ids, logp, logp, own, logp).overlap.tolist() == [0.5]


def test_narrowed_sampling_has_no_probability_outside():
    """With top-k 1 while 2 were asked for, q = (1, 0). The trainer has .6 there."""
    ids, logp_trainer = torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.3]]).log()
    found = distances(ids, torch.tensor([[0.0, -math.inf]]), logp_trainer, ids, logp_trainer)
    assert (found.tv_low.item(), found.tv_high.item()) == pytest.approx((0.4, 0.4))
    assert found.kl_low.item() == pytest.approx(math.log(1 / 0.6), rel=1e-4)


def test_shares_above():
    found = of([[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]], [[0.5, 0.5, 0.0], [0.5, 0.4, 0.1]], 2)
    assert found.above([0.0, 0.3, 0.399999, 0.5]) == ([0.5, 0.5, 0.5, 0.0], [0.5, 0.5, 0.5, 0.0])


@given(st.integers(0, 10**6), st.integers(2, 12), st.data(), st.floats(0.01, 5))
@examples(60)
def test_bounds_hold_and_meet_at_the_whole_vocabulary(seed, vocabulary, data, spread):
    generator = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, 4, vocabulary, generator=generator, dtype=torch.float64)
    p, q = (2 * logits).softmax(-1), (2 * logits + spread * noise).softmax(-1)
    tv, kl = (p - q).abs().sum(-1) / 2, (q * (q / p).log()).sum(-1)
    found = of(p.tolist(), q.tolist(), data.draw(st.integers(1, vocabulary)))
    assert (found.tv_low <= tv + 2e-6).all()
    assert (tv <= found.tv_high + 2e-6).all()
    assert (found.kl_low <= kl + 1e-5).all()
    whole = of(p.tolist(), q.tolist(), vocabulary)
    bounds = [whole.tv_low, whole.tv_high, whole.kl_low, whole.kl_shared]
    for bound, value in zip(bounds, (tv, tv, kl, kl), strict=True):
        torch.testing.assert_close(bound, value, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole.argmax_differs, p.argmax(-1) != q.argmax(-1))
