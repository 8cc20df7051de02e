"""Outcomes, clipped surrogate and loss: hand-computed values and gradients, and changes that must
have no effect."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.correct.presets import preset
from onepolicy.correct.weights import reweight
from onepolicy.objective.advantages import compute_advantages, compute_outcomes
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.types import TokenBatch
from support.objective_batches import batch, group, random_batch

CONFIG = ObjectiveConfig(clip_low=0.2, clip_high=0.28)


def grad_of(
    logp_new: Tensor, made: TokenBatch, denominator: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    logp_new = logp_new.clone().requires_grad_()
    made = made.replace(
        loss_weight=torch.full(logp_new.shape, 1 / denominator, dtype=logp_new.dtype)
    )
    loss, metrics = policy_loss(logp_new, made, config=CONFIG)
    loss.backward()
    assert logp_new.grad is not None
    return loss.detach(), metrics, logp_new.grad


# --- outcomes and credit --------------------------------------------------------------------------


def test_outcomes_by_hand() -> None:
    """Rewards 0, 0, 1, 3: mean 1, deviations -1 -1 0 2, sample variance 6 / 3."""
    (made,) = compute_outcomes([group([0, 0, 1, 3])], ObjectiveConfig(normalise="std"))
    assert [s.outcome for s in made.samples] == pytest.approx(
        [-1 / math.sqrt(2), -1 / math.sqrt(2), 0, math.sqrt(2)], abs=2e-6
    )
    (centred,) = compute_outcomes([group([0, 0, 1, 3])], ObjectiveConfig(normalise="none"))
    assert [s.outcome for s in centred.samples] == [-1, -1, 0, 2]


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0] * 8, [0.0] * 3, [0.7]])
@pytest.mark.parametrize("normalise", ["std", "none"])
def test_equal_rewards_give_exactly_zero(rewards: list[float], normalise: str) -> None:
    (made,) = compute_outcomes([group(rewards)], ObjectiveConfig(normalise=normalise))
    assert [s.outcome for s in made.samples] == [0.0] * len(rewards)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_outcomes_are_centred_within_their_own_group(rewards: list[list[float]]) -> None:
    together = compute_outcomes([group(r, i) for i, r in enumerate(rewards)], CONFIG)
    for index, (made, own) in enumerate(zip(together, rewards, strict=True)):
        assert made.problem_id == index
        values = [s.outcome for s in made.samples]
        assert values == [s.outcome for s in compute_outcomes([group(own)], CONFIG)[0].samples]
        assert sum(v for v in values if v is not None) == pytest.approx(0, abs=1e-8)
        assert [s.reward for s in made.samples] == own


def test_a_reward_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="problem 17, sample 1: reward is nan"):
        compute_outcomes([group([0.0, math.nan], 17)], CONFIG)


def test_credit() -> None:
    trainable = torch.tensor([False, True, True, False, True])
    made = batch([3, 2], trainable, [1.5, -0.5])
    credited = compute_advantages(made, CONFIG)
    assert credited.advantage is not None
    assert credited.advantage.tolist() == [0, 1.5, 1.5, 0, -0.5]
    assert made.advantage is None
    assert made.num_trainable == 3


# --- loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "coefficient"), [(0.25, 0.25), (1.5, 1.5), (4.0, 2.0), (10.0, 2.0)]
)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_tis_scales_the_gradient_and_does_not_feed_the_clip(
    rho: float, coefficient: float, advantage: float
) -> None:
    """At theta = theta_old TIS gives min(rho, C) A for either sign: the mismatch ratio never meets
    the PPO clip."""
    old = torch.tensor([-1.0])
    applied = reweight(old, old - math.log(rho), torch.tensor([True]), preset("tis"))
    made = compute_advantages(batch([1], torch.tensor([True]), [advantage]), CONFIG)
    made = made.replace(logp_old=old, weight=applied.weight, keep=applied.keep)
    _, metrics, grad = grad_of(old, made, applied.denominator)
    assert grad.item() == pytest.approx(-coefficient * advantage)
    assert metrics["clip_high"] == metrics["clip_low"] == 0


def test_token_mean_of_tis_weights() -> None:
    """Advantage -1 on policy turns the surrogate into 1 per slot, so the loss is the token mean of
    the weights."""
    ratios = torch.tensor([1, 4, 1 / 4, 1, 2, 2, 9, 9])
    trainable = torch.arange(8) < 6
    made = compute_advantages(batch([4, 4], trainable, [-1.0, -1.0]), CONFIG)
    applied = reweight(ratios.log(), torch.zeros(8), trainable, preset("tis"))
    made = made.replace(logp_old=ratios.log(), weight=applied.weight, keep=applied.keep)
    loss, _, _ = grad_of(ratios.log(), made, applied.denominator)
    assert loss.item() == pytest.approx(1.375)


def test_loss_metrics_and_gradient_by_hand() -> None:
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


@given(seed=st.integers(0, 10**6), parts=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_micro_batches_add_up_to_the_whole(seed: int, parts: int) -> None:
    logp_new, made = random_batch(seed)
    denominator = made.num_trainable
    loss, metrics, grad = grad_of(logp_new, made, denominator)
    order = torch.randperm(made.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = made.cu_seqlens.tolist()
    summed, gathered, sums = 0.0, torch.zeros_like(grad), dict.fromkeys(metrics, 0.0)
    for chosen in (order[p::parts] for p in range(parts)):
        slots = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in chosen])
        part, values, gathered[slots] = grad_of(logp_new[slots], made.select(chosen), denominator)
        summed += part.item()
        sums = {name: sums[name] + values[name].item() for name in sums}
    assert summed == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(gathered, grad, rtol=1e-12, atol=1e-15)
    assert sums == pytest.approx({name: value.item() for name, value in metrics.items()})


@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
@settings(max_examples=40, deadline=None)
def test_garbage_in_dropped_slots_changes_no_bit(seed: int, garbage: float) -> None:
    logp_new, made = random_batch(seed)
    assert made.keep is not None
    assert made.logp_old is not None
    assert made.weight is not None
    assert made.advantage is not None
    clean = grad_of(logp_new, made, 9)
    gone = ~made.keep
    dirty = made.replace(
        logp_old=made.logp_old.masked_fill(gone, -garbage),
        weight=made.weight.masked_fill(gone, garbage),
        advantage=made.advantage.masked_fill(gone, garbage),
    )
    loss, metrics, grad = grad_of(logp_new.masked_fill(gone, garbage), dirty, 9)
    assert torch.equal(loss, clean[0])
    assert torch.equal(grad, clean[2])
    assert metrics == clean[1]
    assert (grad[gone] == 0).all()


def test_a_fully_rejected_batch_is_zero_with_a_live_graph() -> None:
    logp_new, made = random_batch(0)
    loss, metrics, grad = grad_of(
        logp_new, made.replace(keep=torch.zeros_like(made.trainable)), made.num_trainable
    )
    assert loss == 0
    assert (grad == 0).all()
    assert all(value == 0 for value in metrics.values())


def test_rejecting_a_slot_does_not_change_the_others() -> None:
    logp_new, made = random_batch(3)
    assert made.keep is not None
    fewer = made.replace(keep=made.keep & (torch.arange(made.num_slots) != 0))
    before, after = grad_of(logp_new, made, 11)[2], grad_of(logp_new, fewer, 11)[2]
    assert before[0] != 0
    assert torch.equal(before[1:], after[1:])
    assert after[0] == 0


def test_a_step_without_slots_is_refused() -> None:
    _, made = random_batch(0)
    with pytest.raises(UsageError, match="no trainable slot"):
        loss_weights(made.replace(trainable=torch.zeros_like(made.trainable)), CONFIG, max_tokens=9)
