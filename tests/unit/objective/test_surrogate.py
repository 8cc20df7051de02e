"""Surrogates and KL terms: values and gradients worked by hand, and changes that must have no
effect."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.config.objective import KLConfig, objective_presets
from onepolicy.objective.surrogate import Surrogate, kl_estimate, kl_loss, surrogate

PRESETS = list(objective_presets())


def evaluate(
    config: ObjectiveConfig,
    ratios: list[float],
    advantage: list[float],
    *,
    lengths: list[int] | None = None,
    mask: list[bool] | None = None,
    logp: float = -2.0,
) -> tuple[Surrogate, list[float]]:
    """Return the surrogate of slots with log pi_new = logp and these ratios, and the gradient of
    its sum over the mask."""
    new = torch.full((len(ratios),), logp, dtype=torch.float64, requires_grad=True)
    lengths = lengths or [1] * len(ratios)
    chosen = torch.tensor(mask or [True] * len(ratios))
    out = surrogate(
        config,
        new,
        new.detach() - torch.tensor(ratios, dtype=torch.float64).log(),
        torch.tensor(advantage, dtype=torch.float64),
        mask=chosen,
        segment=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        samples=len(lengths),
    )
    out.loss[chosen].sum().backward()
    assert new.grad is not None
    return out, new.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "low", "high"),
    [  # slope = d loss / d logp_new = -r A where the unclipped branch is taken, else 0
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.1, 1.0, -1.1, -1.1, False, False),
        (
            1.25,
            1.0,
            -1.25,
            -1.25,
            False,
            False,
        ),  # beyond 1 + clip_low, within 1 + clip_high: clip-higher
        (1.5, 1.0, -1.28, 0.0, False, True),
        (1.5, -1.0, 1.5, 1.5, False, False),
        (0.5, 1.0, -0.5, -0.5, False, False),
        (0.5, -1.0, 0.8, 0.0, True, False),
        (0.9, -2.0, 1.8, 1.8, False, False),
        (3.0, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_ppo_clip_by_hand(
    ratio: float, advantage: float, loss: float, slope: float, low: bool, high: bool
) -> None:
    out, grad = evaluate(ObjectiveConfig(), [ratio], [advantage])
    assert out.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx([slope])
    assert out.ratio.item() == pytest.approx(ratio)
    assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)


@pytest.mark.parametrize(
    ("ratio", "loss", "slope", "high"),
    [(2.0, 2, 2, False), (5.0, 3, 0, True), (0.5, 0.8, 0, False)],
)
def test_dual_clip_bounds_the_loss_of_a_negative_advantage(
    ratio: float, loss: float, slope: float, high: bool
) -> None:
    out, grad = evaluate(ObjectiveConfig(dual_clip=3.0), [ratio], [-1])
    assert out.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx([slope])
    assert out.clipped_high.item() == high


def test_policy_gradient_has_no_ratio() -> None:
    out, grad = evaluate(ObjectiveConfig(surrogate="pg"), [7.0, 0.1], [1, -3])
    assert out.loss.tolist() == [2, -6]  # log pi = -2
    assert grad == [-1, 3]


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [
        (6.0, 1, 5, False, True),
        (6.0, -1, 5, False, True),
        (0.5, -1, 0.8, True, False),
        (1.5, 2, 1.5, False, False),
    ],
)
def test_cispo_keeps_the_gradient_of_a_clipped_slot(
    ratio: float, advantage: float, weight: float, low: bool, high: bool
) -> None:
    out, grad = evaluate(
        ObjectiveConfig(surrogate="cispo", clip_low=0.2, clip_high=4), [ratio], [advantage]
    )
    assert out.loss.item() == pytest.approx(2 * weight * advantage)
    assert grad == pytest.approx([-weight * advantage])
    assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # tau 1 and 1.05; sigmoid(1) = 0.7310586, sigmoid(1.05) = 0.7407749
        (1.0, 1, -2, -1),
        (1.0, -1, 2 / 1.05, 1),
        (2.0, 1, -4 * 0.7310586, -4 * 0.7310586 * 0.2689414 * 2),
        (2.0, -1, 4 / 1.05 * 0.7407749, 4 * 0.7407749 * 0.2592251 * 2),
    ],
)
def test_sapo_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    out, grad = evaluate(ObjectiveConfig(surrogate="sapo"), [ratio], [advantage])
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert grad == pytest.approx([slope], rel=1e-6)


@pytest.mark.parametrize(
    ("level", "ratios", "weights"),
    [
        ("trajectory", [0.5, 0.5], [0.25, 0.25]),
        ("trajectory", [2.0, 3.0], [1, 1]),
        ("token", [0.5, 3.0], [0.5, 1]),
        ("sequence", [0.25, 1.0], [0.5, 0.5]),
    ],
)
def test_topr_tapers_negative_samples_only(
    level: str, ratios: list[float], weights: list[float]
) -> None:
    config = ObjectiveConfig(surrogate="topr", ratio_level=level)  # type: ignore[arg-type]
    out, grad = evaluate(config, ratios, [-1, -1], lengths=[2])
    assert out.loss.tolist() == pytest.approx([-2 * w for w in weights])
    assert grad == pytest.approx(weights)
    _, grad = evaluate(config, ratios, [1, 1], lengths=[2])
    assert grad == [-1, -1]


GSPO = ObjectiveConfig(ratio_level="sequence")
GSPO_TOKEN = ObjectiveConfig(ratio_level="sequence-token")


def test_gspo_by_hand() -> None:
    """r = (1.21, 1) gives s = 1.1. Each slot's loss has s, whose gradient is s / 2 in either slot:
    -(A1 + A2) s / 2."""
    ratios, lengths = [1.21, 1.0, 4.0, 1.0], [2, 2]
    out, grad = evaluate(GSPO, ratios, [1, 3, 1, 1], lengths=lengths)
    assert out.loss.tolist() == pytest.approx([-1.1, -3.3, -1.28, -1.28])  # s = 2 is clipped
    assert grad == pytest.approx([-2.2, -2.2, 0, 0])
    assert out.ratio.tolist() == pytest.approx([1.1, 1.1, 2, 2])
    assert out.clipped_high.tolist() == [False, False, True, True]
    token, grad = evaluate(GSPO_TOKEN, ratios, [1, 3, 1, 1], lengths=lengths)
    assert torch.equal(token.loss, out.loss)
    assert grad == pytest.approx([-1.1, -3.3, 0, 0])  # GSPO-token: its own advantage


def test_gspo_and_gspo_token_agree_for_one_advantage_per_sample() -> None:
    one, other = (
        evaluate(c, [1.21, 1, 0.9, 0.7, 0.8], [2, 2, -1, -1, -1], lengths=[2, 3])[1]
        for c in (GSPO, GSPO_TOKEN)
    )
    assert one == pytest.approx(other)


def test_a_sequence_ratio_is_over_the_trainable_slots_of_its_sample() -> None:
    out, grad = evaluate(GSPO, [1.21, 50.0, 1.0], [1, 1, 1], lengths=[3], mask=[True, False, True])
    assert out.ratio.tolist() == pytest.approx([1.1, 1.1, 1.1])
    assert grad[1] == 0


def test_gmpo_by_hand() -> None:
    """A = 1: 4 is clipped to 1.5, exp((log 1.5 + log 2/3) / 2) = 1. A = -1: 2/3 is clipped to 0.8,
    sqrt(3.2)."""
    config = ObjectiveConfig(surrogate="gmpo", clip_low=0.2, clip_high=0.5)
    out, grad = evaluate(config, [4, 2 / 3, 4, 2 / 3], [1, 1, -1, -1], lengths=[2, 2])
    root = math.sqrt(3.2)
    assert out.loss.tolist() == pytest.approx([-1, -1, root, root])
    assert grad == pytest.approx([0, -1, root, 0])  # two copies, half the mean each
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


@pytest.mark.parametrize("name", PRESETS)
def test_on_policy_every_surrogate_is_the_policy_gradient(name: str) -> None:
    """At r = 1 the gradient is -A in every slot, for every surrogate, if a sample has one
    advantage."""
    _, grad = evaluate(ObjectiveConfig(preset=name), [1.0] * 5, [2, 2, -1, -1, -1], lengths=[2, 3])
    assert grad == pytest.approx([-2, -2, 1, 1, 1])


@pytest.mark.parametrize("anchor", [-1e4, 1e4, math.inf, math.nan])
@pytest.mark.parametrize("name", PRESETS)
def test_nothing_overflows(name: str, anchor: float) -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    out = surrogate(
        ObjectiveConfig(preset=name),
        new,
        torch.tensor([anchor, -1.0]),
        torch.tensor([1.0, -1.0]),
        mask=torch.tensor([True, True]),
        segment=torch.tensor([0, 0]),
        samples=1,
    )
    out.loss.sum().backward()
    assert new.grad is not None
    assert out.loss.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("name", PRESETS)
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
@settings(max_examples=8, deadline=None)
def test_masked_slots_and_the_order_of_samples_change_nothing(
    name: str, seed: int, garbage: float
) -> None:
    config, g = ObjectiveConfig(preset=name), torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 1, 4])
    segment = torch.arange(3).repeat_interleave(lengths)
    new, old = (-torch.rand(8, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(8, generator=g) < 0.6
    advantage = torch.randn(3, generator=g, dtype=torch.float64)[segment]

    def run(new: Tensor, old: Tensor, order: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
        leaf = new.clone().requires_grad_()
        out = surrogate(
            config, leaf, old, advantage[order], mask=mask[order], segment=segment, samples=3
        )
        torch.where(mask[order], out.loss, 0.0).sum().backward()
        assert leaf.grad is not None
        return torch.where(mask[order], out.loss.detach(), 0.0), leaf.grad

    straight = torch.arange(8)
    clean = run(new, old, straight, segment)
    dirty = run(
        new.masked_fill(~mask, garbage), old.masked_fill(~mask, -garbage), straight, segment
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    order = torch.cat([torch.arange(4, 8), torch.arange(3, 4), torch.arange(3)])
    turned = run(new[order], old[order], order, torch.arange(3).repeat_interleave(lengths.flip(0)))
    for a, b in zip(clean, turned, strict=True):
        torch.testing.assert_close(a[order], b)


@pytest.mark.parametrize("name", PRESETS)
def test_a_policy_without_a_finite_probability_is_not_hidden(name: str) -> None:
    new = torch.tensor([math.nan], requires_grad=True)
    out = surrogate(
        ObjectiveConfig(preset=name),
        new,
        torch.tensor([-1.0]),
        torch.tensor([1.0]),
        mask=torch.tensor([True]),
        segment=torch.tensor([0]),
        samples=1,
    )
    assert out.loss.isnan().all()


# --- KL -------------------------------------------------------------------------------------------


def expected_kl(estimator: str, *, sampled: bool) -> tuple[float, list[float]]:
    """Return the exact expectation under q = (.7, .3) of the KL term for p = (.6, .4), ref = (.5,
    .5), and its logit gradient."""
    logits = torch.tensor([0.6, 0.4], dtype=torch.float64).log().requires_grad_()
    logp, q = logits.log_softmax(-1), torch.tensor([0.7, 0.3], dtype=torch.float64)
    config = KLConfig(coef=1, estimator=estimator, importance="rollout" if sampled else "none")
    term = kl_loss(
        logp,
        torch.full((2,), 0.5).double().log(),
        config,
        logp_sampled=q.log() if sampled else None,
    )
    value = (q * term).sum()
    value.backward()
    assert logits.grad is not None
    return value.item(), logits.grad.tolist()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weighted_kl_is_unbiased_in_value_and_gradient(estimator: str) -> None:
    """KL(p || ref) = .6 log 1.2 + .4 log .8 = .0201355; its logit gradient is p_a (log p_a / ref_a
    - KL)."""
    value, grad = expected_kl(estimator, sampled=True)
    assert value == pytest.approx(0.0201355136)
    assert grad == pytest.approx([0.0973116, -0.0973116], abs=1e-6)


def test_plain_k3_is_neither_off_policy() -> None:
    value, grad = expected_kl("k3", sampled=False)
    assert value == pytest.approx(0.0190154, abs=1e-7)
    assert grad == pytest.approx([0.0916667, -0.0916667], abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value"),
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)],
)
def test_kl_estimates_by_hand(estimator: str, value: float) -> None:
    config = KLConfig(coef=1, where="reward", estimator=estimator)  # type: ignore[arg-type]
    found = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]) - math.log(2), config)
    assert found.item() == pytest.approx(value)
