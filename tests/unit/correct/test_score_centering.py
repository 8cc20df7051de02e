"""Score centering (B6, arXiv 2609.20807) by itself and as a term of the policy loss."""

import pytest
import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, ObjectiveConfig
from onepolicy.correct.current_policy import (
    centered_score,
    centered_support_score,
    live_weights,
)
from onepolicy.correct.presets import preset
from onepolicy.objective.loss import policy_loss
from support.objective_batches import batch

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)  # trainer
Q = torch.tensor([0.1, 0.3, 0.25, 0.35], dtype=torch.float64)  # rollout; rho = 4, 1, .8, .2857
SUPPORT = {"ratio": "new/rollout", "centering": "support"}


def score_gradient(p, value_of) -> list[float]:
    """Return the gradient of a value of log-probabilities with respect to the logits."""
    logits = p.log().requires_grad_()
    value_of(logits.log_softmax(-1)).sum().backward()
    return logits.grad.tolist()


def mean_score(p, q, config, head=slice(None)) -> list[float]:
    """Return the gradient of the centred score of q, of which the trainer gives the head."""
    return score_gradient(p, lambda logp: centered_score(logp[head], q[head].log(), config))


def test_score_centering_b6() -> None:
    p, q = torch.tensor([[0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
    full = CorrectionConfig(ratio="new/rollout", centering="support")
    assert mean_score(p, q, full) == pytest.approx([-0.1, 0.1])
    for action, expected in enumerate(([0.5, -0.5], [-0.5, 0.5])):
        centred = score_gradient(
            p, lambda logp, a=action: logp[a] - centered_score(logp, q.log(), full)
        )
        assert centred == pytest.approx(expected)


def test_score_centering_from_a_head_b6() -> None:
    """Head {0, 1}: alpha = (1 - .6) / (1 - .65) = 8/7. With q = alpha p outside it is the same."""
    p = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)
    q = torch.cat([torch.tensor([0.3, 0.3], dtype=torch.float64), p[2:] * 8 / 7])
    capped = preset("score-centering-tis", weight={"high": 1.05})
    for config, expected in (
        (preset("score-centering"), [-0.1, 0.05, 0.0214286, 0.0142857, 0.0085714, 0.0057143]),
        (capped, [-0.051, 0.02125, 0.01275, 0.0085, 0.0051, 0.0034]),
    ):
        assert mean_score(p, q, config, slice(2)) == pytest.approx(expected, abs=1e-6)
        support = config.model_copy(update={"centering": "support"})
        assert mean_score(p, q, support) == pytest.approx(expected, abs=1e-6)


def test_a_tail_of_rounding_noise_is_left_out() -> None:
    """The head holds all but 1e-7 of either in float32, so alpha would be arbitrary."""
    p, q = torch.tensor([[0.7, 0.3, 0.5e-7, 0.5e-7], [0.6, 0.4, 1e-8, 1e-8]])
    for weight in ({}, {"level": "token"}, {"level": "token", "high": 2.0}):
        config = CorrectionConfig(ratio="new/rollout", centering="head", weight=weight)
        support = config.model_copy(update={"centering": "support"})
        expected = mean_score(p, q, support)
        assert mean_score(p, q, config, slice(2)) == pytest.approx(expected, abs=1e-5), weight


def test_tokens_the_rollout_cannot_sample_have_no_score() -> None:
    """-inf among the likeliest tokens (narrowed sampling) gives no 0 * inf."""
    config = CorrectionConfig(ratio="new/rollout", centering="support", weight={"level": "token"})
    q = torch.tensor([0.5, 0.5, 0.0, 0.0])
    # sum of q rho s over what q can sample
    expected = score_gradient(P.float(), lambda logp: (P.float() * logp)[:2])
    assert mean_score(P.float(), q, config) == pytest.approx(expected, abs=1e-6)


def test_sets_of_several_slots() -> None:
    """Of every set, as of the same tokens in a table. The last slot's token was certain."""
    config = CorrectionConfig(
        ratio="new/rollout", centering="support", weight={"level": "token", "high": 2.0}
    )
    sizes = torch.tensor([4, 3, 1])
    rollout = torch.cat([Q, Q[:3] / Q[:3].sum(), torch.ones(1, dtype=torch.float64)]).log()
    logits = torch.cat([P, P[1:], P[:1]]).log().requires_grad_()
    sets = zip(logits.split(sizes.tolist()), rollout.split(sizes.tolist()), strict=True)
    expected = torch.stack([centered_score(p.log_softmax(-1), q, config) for p, q in sets])
    (wanted,) = torch.autograd.grad((expected * torch.arange(1, 4)).sum(), logits)
    logp = torch.cat([part.log_softmax(-1) for part in logits.split(sizes.tolist())])
    found = centered_support_score(logp, rollout, sizes, config)
    (gradient,) = torch.autograd.grad((found * torch.arange(1, 4)).sum(), logits)
    assert gradient.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
    assert gradient[:7].abs().min() > 1e-3
    assert gradient[7] == 0


def gradient(config: CorrectionConfig, advantage: Tensor) -> Tensor:
    """Return the gradient [V] of the loss with respect to the logits, in expectation over actions a
    ~ Q: one slot each, with share Q(a)."""
    trainable = torch.ones(len(Q), dtype=torch.bool)
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(-1)
    fields = {"logp_rollout": Q.log(), "loss_weight": Q, "advantage": advantage}
    micro = batch([len(Q)], trainable, [0.0], **fields)
    live = live_weights(logp, micro.logp_rollout, trainable, config, segment=micro.segment)
    score_baseline = None
    if config.centering != "none":
        baseline = centered_score(logp.expand(len(Q), -1), Q.log(), config)
        score_baseline = torch.where(live.centred, baseline, 0.0)
    loss, _ = policy_loss(
        logp,
        micro.replace(weight=live.weight, keep=live.keep),
        config=ObjectiveConfig(preset="reinforce"),
        logp_behaviour=micro.logp_rollout,
        score_baseline=score_baseline,
    )
    loss.backward()
    return logits.grad


RHO = P / Q
BAND = {"level": "token", "low": 0.5, "high": 3.0, "outside": "zero"}
WEIGHTS = {  # name -> settings, weights f of the four tokens
    "none": ({}, torch.ones_like(RHO)),
    "tis": ({"level": "token", "high": 2.0}, RHO.clamp(max=2.0)),
    "icepop": (BAND, torch.where((RHO >= 0.5) & (RHO <= 3.0), RHO, 0.0)),
}


@pytest.mark.parametrize(("weight", "f"), WEIGHTS.values(), ids=WEIGHTS)
def test_the_loss_is_the_covariance_of_advantage_and_score(weight, f: Tensor) -> None:
    """By hand: grad = -sum_a q_a A_a (f_a s_a - mu), mu = sum_v q_v f_v s_v. A constant advantage
    moves nothing, while the same weights without centering drift by -A mu. Slots that only the
    bounds reject keep their part of mu."""
    config = CorrectionConfig.model_validate(SUPPORT | {"weight": weight})
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
    """A sequence that a gate rejects is out of the loss as a whole."""
    gate = {"statistic": "k3", "aggregate": "mean", "scope": "sequence", "high": 1e-3}
    config = CorrectionConfig.model_validate(SUPPORT | {"gates": [gate]})
    assert (gradient(config, torch.ones(4, dtype=torch.float64)) == 0).all()
    logp, mask = torch.tensor([0.5, 0.5]).log(), torch.ones(2, dtype=torch.bool)
    assert live_weights(logp, logp, mask, config, segment=torch.zeros(2).long()).centred.all()
