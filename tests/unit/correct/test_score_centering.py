"""Score centering (B6, arXiv 2609.20807) by itself and as a term of the policy loss."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, ObjectiveConfig
from onepolicy.correct.current_policy import centered_score, live_weights
from onepolicy.correct.presets import preset
from onepolicy.objective.loss import policy_loss
from support.objective_batches import batch

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)  # trainer
Q = torch.tensor([0.1, 0.3, 0.25, 0.35], dtype=torch.float64)  # rollout; rho = 4, 1, .8, .2857
SUPPORT = {"ratio": "new/rollout", "centering": "support"}


def score_gradient(p: Tensor, value_of: object) -> list[float]:
    """Return the gradient of a value of log-probabilities with respect to the logits."""
    logits = p.log().requires_grad_()
    value_of(logits.log_softmax(-1)).sum().backward()  # type: ignore[operator]
    assert logits.grad is not None
    return logits.grad.tolist()


def test_score_centering_b6() -> None:
    p, q = (
        torch.tensor([0.6, 0.4], dtype=torch.float64),
        torch.tensor([0.5, 0.5], dtype=torch.float64),
    )
    full = CorrectionConfig(ratio="new/rollout", centering="support")
    assert score_gradient(p, lambda logp: centered_score(logp, q.log(), full)) == pytest.approx(
        [-0.1, 0.1]
    )
    for action, expected in enumerate(([0.5, -0.5], [-0.5, 0.5])):
        centred = score_gradient(
            p, lambda logp, a=action: logp[a] - centered_score(logp, q.log(), full)
        )
        assert centred == pytest.approx(expected)


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (None, [-0.1, 0.05, 0.0214286, 0.0142857, 0.0085714, 0.0057143]),
        (1.05, [-0.051, 0.02125, 0.01275, 0.0085, 0.0051, 0.0034]),
    ],
)
def test_score_centering_from_a_head_b6(cap: float | None, expected: list[float]) -> None:
    """Head {0, 1}: alpha = (1 - .6) / (1 - .65) = 8/7. The whole vocabulary with q = alpha p
    outside gives the same."""
    p = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)
    head = torch.tensor([0.3, 0.3], dtype=torch.float64)
    config = (
        preset("score-centering")
        if cap is None
        else preset("score-centering-tis", weight={"high": cap})
    )
    assert score_gradient(
        p, lambda logp: centered_score(logp[:2], head.log(), config)
    ) == pytest.approx(expected, abs=1e-6)
    whole = torch.cat([head, p[2:] * 8 / 7])
    support = config.model_copy(update={"centering": "support"})
    assert score_gradient(
        p, lambda logp: centered_score(logp, whole.log(), support)
    ) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("weight", [{}, {"level": "token"}, {"level": "token", "high": 2.0}])
def test_a_tail_of_rounding_noise_is_left_out(weight: dict[str, object]) -> None:
    """The head holds all but 1e-7 of either distribution in float32, so alpha would be
    arbitrary."""
    config = CorrectionConfig(ratio="new/rollout", centering="head", weight=weight)
    p = torch.tensor([0.7, 0.3, 0.5e-7, 0.5e-7])
    q = torch.tensor([0.6, 0.4, 1e-8, 1e-8])
    found = score_gradient(p, lambda logp: centered_score(logp[:2], q[:2].log(), config))
    support = config.model_copy(update={"centering": "support"})
    assert found == pytest.approx(
        score_gradient(p, lambda logp: centered_score(logp, q.log(), support)), abs=1e-5
    )


def test_tokens_the_rollout_cannot_sample_have_no_score() -> None:
    """-inf among the likeliest tokens (narrowed sampling) with an unbounded weight gives no 0 *
    inf."""
    config = CorrectionConfig(ratio="new/rollout", centering="support", weight={"level": "token"})
    q = torch.tensor([0.5, 0.5, 0.0, 0.0])
    found = score_gradient(P.float(), lambda logp: centered_score(logp, q.log(), config))
    expected = score_gradient(
        P.float(), lambda logp: (P.float() * logp)[:2]
    )  # sum of q rho s over what q can sample
    assert found == pytest.approx(expected, abs=1e-6)


def gradient(config: CorrectionConfig, advantage: Tensor) -> Tensor:
    """Return the gradient [V] of the loss with respect to the logits, in expectation over actions a
    ~ Q: one slot each, with share Q(a)."""
    actions = len(Q)
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(-1)
    trainable = torch.ones(actions, dtype=torch.bool)
    micro = batch(
        [actions], trainable, [0.0], logp_rollout=Q.log(), loss_weight=Q, advantage=advantage
    )
    live = live_weights(logp, micro.logp_rollout, trainable, config, segment=micro.segment)
    score_baseline = None
    if config.centering != "none":
        score_baseline = torch.where(
            live.centred, centered_score(logp.expand(actions, -1), Q.log(), config), 0.0
        )
    loss, _ = policy_loss(
        logp,
        micro.replace(weight=live.weight, keep=live.keep),
        config=ObjectiveConfig(preset="reinforce"),
        logp_behaviour=micro.logp_rollout,
        score_baseline=score_baseline,
    )
    loss.backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    "weight",
    [
        {},
        {"level": "token", "high": 2.0},
        {"level": "token", "low": 0.5, "high": 3.0, "outside": "zero"},
    ],
    ids=["none", "tis", "icepop"],
)
def test_the_loss_is_the_covariance_of_advantage_and_score(weight: dict[str, object]) -> None:
    """By hand: grad = -sum_a q_a A_a (f_a s_a - mu), mu = sum_v q_v f_v s_v. A constant advantage
    moves nothing, while the same weights without centering drift by -A mu. Slots that only the
    bounds reject keep their part of mu."""
    config = CorrectionConfig.model_validate(SUPPORT | {"weight": weight})
    rho = P / Q
    f = {"none": torch.ones_like(rho), "clip": rho.clamp(max=2.0)}.get(
        "none" if not weight else config.weight.outside,
        torch.where((rho >= 0.5) & (rho <= 3.0), rho, 0.0),
    )
    score = torch.eye(4, dtype=torch.float64) - P  # [a, logit]
    mu = (Q * f) @ score
    assert mu.abs().max() > 0.05
    same = torch.full((4,), 1.5, dtype=torch.float64)
    assert gradient(config, same).tolist() == pytest.approx([0.0] * 4, abs=1e-7)
    if weight:
        drift = gradient(config.model_copy(update={"centering": "none"}), same)
        assert drift.tolist() == pytest.approx((-1.5 * mu).tolist(), abs=1e-7)
    advantage = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
    expected = -((Q * advantage)[:, None] * (f[:, None] * score - mu)).sum(0)
    assert gradient(config, advantage).tolist() == pytest.approx(expected.tolist(), abs=1e-7)


def test_a_gate_drops_the_mean_score_with_the_slot() -> None:
    """A gate on the sequence does not judge single tokens: a rejected sequence is out of the loss
    as a whole."""
    gate = {"statistic": "k3", "aggregate": "mean", "scope": "sequence", "high": 1e-3}
    config = CorrectionConfig.model_validate(SUPPORT | {"gates": [gate]})
    assert (gradient(config, torch.ones(4, dtype=torch.float64)) == 0).all()
    logp = torch.tensor([math.log(0.5)] * 2)
    live = live_weights(
        logp, logp, torch.ones(2, dtype=torch.bool), config, segment=torch.zeros(2).long()
    )
    assert live.centred.all()
