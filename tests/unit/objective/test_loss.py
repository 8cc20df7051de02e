"""Outcomes, clipped surrogate and loss: hand-computed values and gradients, and changes that must
have no effect."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.correct.presets import preset
from onepolicy.correct.reweight import reweight
from onepolicy.objective.advantages import compute_advantages, compute_outcomes
from onepolicy.objective.loss import loss_weights, policy_loss
from support.objective_batches import batch, group, random_batch

CONFIG = ObjectiveConfig(clip_low=0.2, clip_high=0.28)


def grad_of(logp_new, made, denominator):
    """Return loss, metrics and gradient of a mean over so many slots."""
    logp_new = logp_new.clone().requires_grad_()
    made = made.replace(loss_weight=torch.full_like(logp_new, 1 / denominator))
    loss, metrics = policy_loss(logp_new, made, config=CONFIG, logp_behaviour=made.logp_old)
    loss.backward()
    return loss.detach(), metrics, logp_new.grad


def outcomes(made):
    return [sample.outcome for sample in made.samples]


# --- outcomes and credit --------------------------------------------------------------------------
def test_outcomes_by_hand():
    """Rewards 0, 0, 1, 3: mean 1, deviations -1 -1 0 2, sample variance 6 / 3."""
    (made,) = compute_outcomes([group([0, 0, 1, 3])], ObjectiveConfig(normalise="std"))
    root = math.sqrt(2)
    assert outcomes(made) == pytest.approx([-1 / root, -1 / root, 0, root], abs=2e-6)
    (centred,) = compute_outcomes([group([0, 0, 1, 3])], ObjectiveConfig(normalise="none"))
    assert outcomes(centred) == [-1, -1, 0, 2]


@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_outcomes_are_centred_within_their_own_group(rewards):
    together = compute_outcomes([group(r, i) for i, r in enumerate(rewards)], CONFIG)
    for index, (made, own) in enumerate(zip(together, rewards, strict=True)):
        assert made.problem_id == index
        assert outcomes(made) == outcomes(compute_outcomes([group(own)], CONFIG)[0])
        assert sum(outcomes(made)) == pytest.approx(0, abs=1e-8)
        assert [s.reward for s in made.samples] == own


def test_a_reward_that_is_not_a_number_is_refused():
    with pytest.raises(UsageError, match="problem 17, sample 1: reward is nan"):
        compute_outcomes([group([0.0, math.nan], 17)], CONFIG)


def test_credit():
    trainable = torch.tensor([False, True, True, False, True])
    made = batch([3, 2], trainable, [1.5, -0.5])
    assert compute_advantages(made, CONFIG).advantage.tolist() == [0, 1.5, 1.5, 0, -0.5]
    assert made.advantage is None
    assert made.num_trainable == 3


# --- loss -----------------------------------------------------------------------------------------
def test_tis_scales_the_gradient_and_does_not_feed_the_clip(subtests):
    """At theta = theta_old TIS gives min(rho, C) A for either sign: the mismatch ratio never meets
    the PPO clip."""
    old, one = torch.tensor([-5.0]), torch.tensor([True])
    for (rho, coefficient), advantage in product(
        [(0.25, 0.25), (1.5, 1.5), (4.0, 2.0), (10.0, 2.0)], [-1.0, 1.0]
    ):
        with subtests.test(rho=rho, advantage=advantage):
            applied = reweight(old, old - math.log(rho), one, preset("tis"))
            made = compute_advantages(batch([1], one, [advantage]), CONFIG)
            made = made.replace(logp_old=old, weight=applied.weight, keep=applied.keep)
            _, metrics, grad = grad_of(old, made, applied.denominator)
            assert grad.item() == pytest.approx(-coefficient * advantage)
            assert metrics["clip_high"] == metrics["clip_low"] == 0


def test_token_mean_of_tis_weights():
    """Advantage -1 on policy turns the surrogate into 1 per slot, so the loss is the token mean of
    the weights."""
    ratios = torch.tensor([1, 4, 1 / 4, 1, 2, 2, 9, 9])
    trainable = torch.arange(8) < 6
    made = compute_advantages(batch([4, 4], trainable, [-1.0, -1.0]), CONFIG)
    applied = reweight(ratios.log(), torch.zeros(8), trainable, preset("tis"))
    made = made.replace(logp_old=ratios.log(), weight=applied.weight, keep=applied.keep)
    loss, _, _ = grad_of(ratios.log(), made, applied.denominator)
    assert loss.item() == pytest.approx(1.375)


def test_loss_metrics_and_gradient_by_hand():
    ratios = torch.tensor([1.1, 1.5, 0.5, 0.5, 7.0, 7.0])  # the last two: rejected, not trainable
    trainable = torch.tensor([True, True, True, True, True, False])
    made = compute_advantages(batch([2, 4], trainable, [1.0, -1.0]), CONFIG).replace(
        logp_old=torch.full((6,), -2.0),
        weight=torch.tensor([2.0, 1.0, 0.5, 1.0, 1.0, 1.0]),
        keep=torch.arange(6) < 4,
    )
    loss, metrics, grad = grad_of(ratios.log() - 2, made, 5)
    assert loss.item() == pytest.approx((2 * -1.1 + 1 * -1.28 + 0.5 * 0.8 + 1 * 0.8) / 5)
    assert grad.tolist() == pytest.approx([2 * -1.1 / 5, 0, 0, 0, 0, 0])
    assert metrics["clip_high"].item() == 1
    assert metrics["clip_low"].item() == 2
    assert metrics["ratio_dev"].item() == pytest.approx(0.1 + 0.5 + 0.5 + 0.5)
    assert not any(value.requires_grad for value in metrics.values())


def test_garbage_in_dropped_slots_changes_no_bit(subtests):
    for seed, garbage in product(range(4), [math.nan, math.inf, -math.inf, 1e9]):
        with subtests.test(seed=seed, garbage=garbage):
            logp_new, made = random_batch(seed)
            clean, gone = grad_of(logp_new, made, 9), ~made.keep
            assert (gone & made.trainable).any()
            fields = {"weight": garbage, "advantage": garbage, "logp_old": -garbage}
            dirty = {
                name: getattr(made, name).masked_fill(gone, value) for name, value in fields.items()
            }
            new = logp_new.masked_fill(gone, garbage)
            for fields in (dirty, dirty | {"logp_old": made.logp_old}):
                loss, metrics, grad = grad_of(new, made.replace(**fields), 9)
                assert torch.equal(loss, clean[0])
                assert torch.equal(grad, clean[2])
                assert metrics == clean[1]
                assert (grad[gone] == 0).all()


def test_a_step_without_slots_is_refused():
    _, made = random_batch(0)
    with pytest.raises(UsageError, match="no trainable slot"):
        loss_weights(made.replace(trainable=torch.zeros_like(made.trainable)), CONFIG, max_tokens=9)


@pytest.mark.parametrize("reduction", ["sequence-mean-token-mean", "sequence-mean-token-sum"])
def test_a_sample_without_a_trainable_token_counts(reduction):
    """verl and OpenRLHF leave it out of their sequence means: theirs would be twice as large."""
    trainable = torch.tensor([True, True, False, False])
    made, config = batch([2, 2], trainable, [1.0, 1.0]), ObjectiveConfig(reduction=reduction)
    weights = loss_weights(made, config, max_tokens=9)
    share = {"sequence-mean-token-mean": 0.25, "sequence-mean-token-sum": 0.5}[reduction]
    assert weights.tolist() == [share, share, 0, 0]
