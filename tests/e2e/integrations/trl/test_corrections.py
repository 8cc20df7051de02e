"""Corrections in TRL's loss, against TRL's own corrections and against the loss by hand."""

from __future__ import annotations

import pytest
import torch

import onepolicy as op
import onepolicy.integrations.trl as op_trl
from onepolicy.config import UsageError
from onepolicy.config.presets import correction_presets
from onepolicy.integrations.trl.adapter import sampled
from support.trl.tiny import (
    ONE_STEP,
    CopySampler,
    as_vllm,
    completion_logp,
    gradient_by_hand,
    make_trainer,
    model_with,
    parameters,
    sgd_gradient,
    train,
    watched,
)

capability = pytest.mark.capability
pytestmark = pytest.mark.trl
REFUSED = {"score-centering", "score-centering-tis"}


def far_sampler():
    """Return a sampler whose routing alone moves log-probabilities by tenths of a nat."""
    return CopySampler(dtype=torch.float32, router_noise=1.0)


def outcome(folder, *, correction=None, vllm=True, attach=True, scoring="always", **changes):
    """Train with SGD, without replay. Return the log, and the change of the parameters."""
    trainer = make_trainer(folder, sampler=far_sampler(), **changes)
    if vllm:
        as_vllm(trainer)
    if attach:
        op_trl.attach(trainer, replay="off", correction=correction, scoring=scoring)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
    before = parameters(trainer)
    log = train(trainer)
    return log, parameters(trainer) - before


def relative(one, other):
    """Return the distance of two vectors by the length of the second."""
    return float((one - other).norm() / other.norm())


@pytest.fixture(scope="module")
def uncorrected(tmp_path_factory):
    """Return the change of the parameters without a correction, ours or TRL's."""
    return outcome(tmp_path_factory.mktemp("uncorrected"), attach=False, vllm=False)[1]


OWN = {
    "tis": {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    },
    "trl-default": {},
}


@capability("TRL", "fixed corrections", how="live")
@pytest.mark.parametrize("correction", OWN)
def test_equal_to_trls_own(tmp_path, uncorrected, correction):
    ours, our_change = outcome(tmp_path, correction=correction)
    theirs, their_change = outcome(tmp_path, attach=False, **OWN[correction])
    assert relative(our_change, their_change) < 1e-5
    assert relative(uncorrected, their_change) > 0.1  # so it can fail
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5, abs=1e-7)
        assert one["mismatch/mean_dlogp"] == pytest.approx(
            other["sampling/sampling_logp_difference/mean"], rel=1e-4
        )


def test_opsm_is_trls_off_policy_mask(tmp_path, uncorrected):
    """`opsm` in the loss hook against off_policy_mask_threshold."""
    (gate,) = op.preset("opsm").gates
    opsm = op.preset("opsm", gates=[{**gate.model_dump(), "high": 1e-4}])
    _, ours = outcome(tmp_path, correction=opsm, vllm=False)
    _, theirs = outcome(tmp_path, attach=False, vllm=False, off_policy_mask_threshold=1e-4)
    assert relative(ours, theirs) < 1e-5
    assert relative(uncorrected, theirs) > 0.1


@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mis", "pg-tis"])
def test_in_the_training_forward_it_is_the_same(tmp_path, correction):
    """Where generation and update are aligned, old and new policy are one."""
    how = {"correction": correction, "vllm": False, "max_steps": 2}
    before, scored = outcome(tmp_path, **how)
    within, unscored = outcome(tmp_path, **how, scoring="training-forward")
    assert relative(unscored, scored) < 1e-5
    for one, other in zip(before, within, strict=True):
        assert one["mismatch/k3"] == pytest.approx(other["mismatch/k3"], rel=1e-4)


@capability("TRL", "live corrections", how="live")
@pytest.mark.parametrize("correction", ["ppo-is", "pg-tis", "cispo-rollout"])
def test_live_presets_by_hand(tmp_path, correction):
    trainer = make_trainer(tmp_path, sampler=far_sampler(), **ONE_STEP)
    op_trl.attach(trainer, replay="off", correction=correction)
    seen = watched(trainer)
    gradient, before = sgd_gradient(trainer)
    model, inputs = model_with(before), seen[0]
    logp, advantages = completion_logp(model, inputs), inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    rho = torch.where(inputs["completion_mask"].bool(), logp - sampled(inputs), 0.0).exp()
    if correction == "ppo-is":
        loss = -torch.minimum(rho * advantages, rho.clamp(0.8, 1.2) * advantages)
    else:
        bound = {"pg-tis": 2.0, "cispo-rollout": 5.0}[correction]
        loss = -rho.detach().clamp(max=bound) * advantages * logp
    expected = gradient_by_hand(loss, inputs, model)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("name", sorted(correction_presets()))
def test_every_preset_trains_or_is_refused(tmp_path, name):
    trainer = make_trainer(tmp_path, sampler=CopySampler(), max_steps=1, loss_type="grpo")
    if name in REFUSED:
        with pytest.raises(UsageError, match=f"{name}.*likeliest tokens"):
            op_trl.attach(trainer, correction=name)
        return
    op_trl.attach(trainer, correction=name)
    (row,) = train(trainer)
    assert 0 <= row["correction/weight_mean"] < 3
    assert row["correction/slots"] > 30


def test_one_weight_a_sequence_in_rloo(tmp_path):
    trainer = make_trainer(tmp_path, kind="rloo")
    op_trl.attach(trainer, correction="seq-tis")
    for row in train(trainer):
        assert row["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    other = make_trainer(tmp_path, kind="rloo")
    with pytest.raises(UsageError, match=r"tis in loss rloo.*choose seq-tis"):
        op_trl.attach(other, correction="tis")
