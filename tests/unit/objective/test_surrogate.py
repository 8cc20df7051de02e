"""Surrogates and KL terms: values and gradients worked by hand, and changes that must have no
effect."""

import math
from itertools import product

import pytest
import torch

from onepolicy.config import ObjectiveConfig
from onepolicy.config.objective import KLConfig
from onepolicy.config.presets import objective_presets
from onepolicy.config.surrogates import SURROGATES
from onepolicy.objective.kl import kl_estimate, kl_loss
from onepolicy.objective.surrogate import surrogate

PRESETS = list(objective_presets())


def evaluate(config, ratios, advantage, *, lengths=None, mask=None):
    """Return the surrogate of slots with log pi_new = -2 and these ratios, and the gradient of
    its sum over the mask."""
    new = torch.full((len(ratios),), -2.0, dtype=torch.float64, requires_grad=True)
    old = new.detach() - torch.tensor(ratios, dtype=torch.float64).log()
    chosen = torch.tensor(mask or [True] * len(ratios))
    lengths = torch.tensor(lengths or [1] * len(ratios))
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    how = {"mask": chosen, "segment": segment, "samples": len(lengths)}
    out = surrogate(config, new, old, torch.tensor(advantage, dtype=torch.float64), **how)
    out.loss[chosen].sum().backward()
    return out, new.grad.tolist()


def of_one_sample(name, new, old, advantage):
    """Return the surrogate of the preset over one sample of trainable slots."""
    new, old, advantage = (torch.as_tensor(each) for each in (new, old, advantage))
    mask, segment = torch.ones(len(new), dtype=torch.bool), torch.zeros(len(new), dtype=torch.int64)
    config, how = ObjectiveConfig(preset=name), {"mask": mask, "segment": segment, "samples": 1}
    return surrogate(config, new, old, advantage, **how)


# What one slot gives by hand: settings, (ratio, advantage), loss, slope = d loss / d logp_new,
# clipped low, clipped high. log pi_new is -2.
DUAL, CISPO = {"dual_clip": 3.0}, {"surrogate": "cispo", "clip_low": 0.2, "clip_high": 4}
SLOTS = [
    # PPO: the slope is -r A where the unclipped branch is taken, else 0
    ({}, (1.0, 2.0), -2.0, -2.0, False, False),
    ({}, (1.1, 1.0), -1.1, -1.1, False, False),
    ({}, (1.25, 1.0), -1.25, -1.25, False, False),  # between 1 + clip_low and 1 + clip_high
    ({}, (1.5, 1.0), -1.28, 0.0, False, True),
    ({}, (1.5, -1.0), 1.5, 1.5, False, False),
    ({}, (0.5, 1.0), -0.5, -0.5, False, False),
    ({}, (0.5, -1.0), 0.8, 0.0, True, False),
    ({}, (0.9, -2.0), 1.8, 1.8, False, False),
    ({}, (3.0, 0.0), 0.0, 0.0, False, False),
    # the dual clip bounds the loss of a negative advantage
    (DUAL, (2.0, -1.0), 2, 2, False, False),
    (DUAL, (5.0, -1.0), 3, 0, False, True),
    (DUAL, (0.5, -1.0), 0.8, 0, True, False),
    # CISPO keeps the gradient of a clipped slot
    (CISPO, (6.0, 1), 10, -5, False, True),
    (CISPO, (6.0, -1), -10, 5, False, True),
    (CISPO, (0.5, -1), -1.6, 0.8, True, False),
    (CISPO, (1.5, 2), 6, -3, False, False),
    # policy gradient: there is no ratio
    ({"surrogate": "pg"}, (7.0, 1), 2, -1, False, False),
    ({"surrogate": "pg"}, (0.1, -3), -6, 3, False, False),
]


def test_a_slot_by_hand(subtests):
    for settings, (ratio, advantage), loss, slope, low, high in SLOTS:
        with subtests.test(**settings, ratio=ratio, advantage=advantage):
            out, grad = evaluate(ObjectiveConfig(**settings), [ratio], [advantage])
            assert out.loss.item() == pytest.approx(loss)
            assert grad == pytest.approx([slope])
            assert (out.clipped_low.item(), out.clipped_high.item()) == (low, high)
            if settings.get("surrogate") != "pg":
                assert out.ratio.item() == pytest.approx(ratio)


def test_a_row_names_what_its_function_reads(subtests):
    """Another value of a setting changes a loss somewhere if, and only if, the row names it."""
    other = {"clip_low": 0.4, "clip_high": 0.1, "dual_clip": 2.0, "tau_positive": 3.0}
    other |= {"tau_negative": 4.0, "ratio_level": "sequence"}
    ratios, advantage, lengths = [0.3, 0.9, 1.2, 5.0] * 2, [1.0] * 4 + [-2.0] * 4, [4, 4]
    for name, row in SURROGATES.items():
        plain, _ = evaluate(ObjectiveConfig(surrogate=name), ratios, advantage, lengths=lengths)
        named = set(row.reads)
        if row.levels:
            named.add("ratio_level")
        for setting, value in other.items():
            with subtests.test(name, setting=setting):
                config = ObjectiveConfig(surrogate=name, **{setting: value})
                out, _ = evaluate(config, ratios, advantage, lengths=lengths)
                assert (not torch.equal(out.loss, plain.loss)) == (setting in named)


def test_a_row_says_whether_its_ratio_has_a_gradient(subtests):
    """Where it has none, a sample's ratio and its value with the slot's own gradient are one."""
    for name, row in SURROGATES.items():
        if row.levels:
            levels = ("sequence", "sequence-token")
            configs = [ObjectiveConfig(surrogate=name, ratio_level=level) for level in levels]
            grads = [evaluate(each, [0.9, 1.2], [1, 3], lengths=[2])[1] for each in configs]
            with subtests.test(name):
                assert (grads[0] == pytest.approx(grads[1])) == row.detached


def test_sapo_by_hand(subtests):
    for ratio, advantage, loss, slope in (
        # tau 1 and 1.05; sigmoid(1) = 0.7310586, sigmoid(1.05) = 0.7407749
        (1.0, 1, -2, -1),
        (1.0, -1, 2 / 1.05, 1),
        (2.0, 1, -4 * 0.7310586, -4 * 0.7310586 * 0.2689414 * 2),
        (2.0, -1, 4 / 1.05 * 0.7407749, 4 * 0.7407749 * 0.2592251 * 2),
    ):
        with subtests.test(ratio=ratio, advantage=advantage):
            out, grad = evaluate(ObjectiveConfig(surrogate="sapo"), [ratio], [advantage])
            assert out.loss.item() == pytest.approx(loss, rel=1e-6)
            assert grad == pytest.approx([slope], rel=1e-6)


def test_topr_tapers_negative_samples_only(subtests):
    for level, ratios, weights in (
        ("trajectory", [0.5, 0.5], [0.25, 0.25]),
        ("trajectory", [2.0, 3.0], [1, 1]),
        ("token", [0.5, 3.0], [0.5, 1]),
        ("sequence", [0.25, 1.0], [0.5, 0.5]),
    ):
        with subtests.test(level=level, ratios=ratios):
            config = ObjectiveConfig(surrogate="topr", ratio_level=level)
            out, grad = evaluate(config, ratios, [-1, -1], lengths=[2])
            assert out.loss.tolist() == pytest.approx([-2 * w for w in weights])
            assert grad == pytest.approx(weights)
            _, grad = evaluate(config, ratios, [1, 1], lengths=[2])
            assert grad == [-1, -1]


GSPO = ObjectiveConfig(ratio_level="sequence")
GSPO_TOKEN = ObjectiveConfig(ratio_level="sequence-token")


def test_gspo_by_hand():
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


def test_a_sequence_ratio_is_over_the_trainable_slots_of_its_sample():
    out, grad = evaluate(GSPO, [1.21, 50.0, 1.0], [1, 1, 1], lengths=[3], mask=[True, False, True])
    assert out.ratio.tolist() == pytest.approx([1.1, 1.1, 1.1])
    assert grad[1] == 0


def test_gmpo_by_hand():
    """A = 1: 4 is clipped to 1.5, exp((log 1.5 + log 2/3) / 2) = 1. A = -1: 2/3 is clipped to 0.8,
    sqrt(3.2)."""
    config = ObjectiveConfig(surrogate="gmpo", clip_low=0.2, clip_high=0.5)
    out, grad = evaluate(config, [4, 2 / 3, 4, 2 / 3], [1, 1, -1, -1], lengths=[2, 2])
    root = math.sqrt(3.2)
    assert out.loss.tolist() == pytest.approx([-1, -1, root, root])
    assert grad == pytest.approx([0, -1, root, 0])  # two copies, half the mean each
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


def test_on_policy_every_surrogate_is_the_policy_gradient(subtests):
    """At r = 1 the gradient is -A in every slot, for every surrogate, if a sample has one
    advantage."""
    for name in PRESETS:
        with subtests.test(name=name):
            config, advantage = ObjectiveConfig(preset=name), [2, 2, -1, -1, -1]
            _, grad = evaluate(config, [1.0] * 5, advantage, lengths=[2, 3])
            assert grad == pytest.approx([-2, -2, 1, 1, 1])


def test_nothing_overflows(subtests):
    for name, anchor in product(PRESETS, [-1e4, 1e4, math.inf, math.nan]):
        with subtests.test(name=name, anchor=anchor):
            new = torch.tensor([-1.0, -1.0], requires_grad=True)
            out = of_one_sample(name, new, [anchor, -1.0], [1.0, -1.0])
            out.loss.sum().backward()
            assert out.loss.isfinite().all()
            assert new.grad.isfinite().all()


def test_a_policy_without_a_finite_probability_is_not_hidden(subtests):
    for name in PRESETS:
        with subtests.test(name=name):
            assert of_one_sample(name, [math.nan], [-1.0], [1.0]).loss.isnan().all()


# --- KL -------------------------------------------------------------------------------------------
def test_the_expected_kl_and_its_gradient(subtests):
    """Expectations under q = (.7, .3) of the KL term for p = (.6, .4), ref = (.5, .5).

    KL(p || ref) = .6 log 1.2 + .4 log .8 = .0201355; its logit gradient is p_a (log p_a / ref_a -
    KL). Weighted by importance, the term is unbiased in both; plain k3 is neither off policy.
    """
    exact = (0.0201355136, 0.0973116)
    q, ref = torch.tensor([[0.7, 0.3], [0.5, 0.5]], dtype=torch.float64).log()
    for estimator, importance, (value, slope) in (
        ("k1", "rollout", exact),
        ("k3", "rollout", exact),
        ("k3", "none", (0.0190154, 0.0916667)),
    ):
        with subtests.test(estimator=estimator, importance=importance):
            logits = torch.tensor([0.6, 0.4], dtype=torch.float64).log().requires_grad_()
            config = KLConfig(coef=1, estimator=estimator, importance=importance)
            sampled = q if importance == "rollout" else None
            term = kl_loss(logits.log_softmax(-1), ref, config, logp_sampled=sampled)
            found = (q.exp() * term).sum()
            found.backward()
            assert found.item() == pytest.approx(value, abs=1e-7)
            assert logits.grad.tolist() == pytest.approx([slope, -slope], abs=1e-6)


def test_kl_estimates_by_hand():
    log2, logp = math.log(2), torch.tensor([-1.0])
    for estimator, value in (("k1", log2), ("k2", log2**2 / 2), ("k3", log2 - 0.5)):
        config = KLConfig(coef=1, where="reward", estimator=estimator)
        assert kl_estimate(logp, logp - log2, config).item() == pytest.approx(value), estimator
