"""The loss `onepolicy` of verl's registry: every preset that needs the new policy, by hand and
against verl's own loss of the same formula."""

from __future__ import annotations

import pytest
import torch

from onepolicy.config.presets import correction_presets
from onepolicy.correct.presets import preset

pytestmark = pytest.mark.verl
B, R = 6, 9
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


def clipped(r, advantage):
    """Return verl's clipped PPO loss with its defaults, 0.2 and the dual clip at 3."""
    loss = torch.maximum(-advantage * r, -advantage * r.clamp(0.8, 1.2))
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * 3), loss)


def score_function(weight, advantage, new):
    return -weight.detach() * advantage * new


def ppo_is(new, rollout, advantage, mask):
    return clipped((new - rollout).exp(), advantage)


def opsm(new, rollout, advantage, mask):
    k1 = ((rollout - new) * mask).sum(1) / mask.sum(1)
    rejected = (k1 > 0.1)[:, None] & (advantage < 0)
    return clipped((new - rollout).exp(), advantage) * ~rejected.detach()


def ipo(new, rollout, advantage, mask):
    near = (new.exp() - rollout.exp()).abs() <= 0.1
    return score_function((new - rollout).exp() * near, advantage, new)


def dppo_tv(new, rollout, advantage, mask):
    difference = new.exp() - rollout.exp()
    kept = torch.where(advantage > 0, difference <= 0.2, difference >= -0.2)
    return score_function((new - rollout).exp() * kept, advantage, new)


def pg_tis(new, rollout, advantage, mask):
    return score_function((new - rollout).exp().clamp(max=2), advantage, new)


def pg_seq_tis(new, rollout, advantage, mask):
    weight = ((new - rollout) * mask).sum(1, keepdim=True).exp().clamp(max=2)
    return score_function(weight.expand_as(new), advantage, new)


def cispo_rollout(new, rollout, advantage, mask):
    return score_function((new - rollout).exp().clamp(max=5), advantage, new)


BY_HAND = {
    "ppo-is": ppo_is,
    "opsm": opsm,
    "ipo": ipo,
    "dppo-tv": dppo_tv,
    "pg-tis": pg_tis,
    "pg-seq-tis": pg_seq_tis,
    "cispo-rollout": cispo_rollout,
}
"""Loss per token [B, R] of float64 log-probabilities, written out for each preset."""
VERLS_OWN = {
    "ppo-is": {"loss_mode": "vanilla"},
    "dppo-tv": {"loss_mode": "dppo_tv", "clip_ratio_c": 1e9},  # theirs also truncates the ratio
    "pg-tis": {"loss_mode": "bypass_mode", "loss_type": "reinforce", "rollout_is": "token"},
    "pg-seq-tis": {"loss_mode": "bypass_mode", "loss_type": "reinforce", "rollout_is": "sequence"},
    "cispo-rollout": {"loss_mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
}


@pytest.fixture(scope="module")
def batch():
    """Return float64 new, rollout, advantage and mask [B, R], with a tool reply in sample 2.

    Ratios reach from 0.07 to 35, and every bound has tokens or samples on both sides.
    """
    random = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    mask = torch.arange(R) < torch.tensor([9, 7, 9, 3, 1, 5])[:, None]
    mask[2, 3:5] = False
    scale = torch.tensor([2.0, 1.0, 3.0, 0.5, 2.0, 1.5], dtype=torch.float64)
    rollout = -2 * normal(B, R).abs() - 0.05
    new = -scale[:, None] * normal(B, R).abs() - 0.02
    advantage = torch.tensor([1.0, -1.0, -0.5, 2.0, -0.3, 0.7], dtype=torch.float64)
    return new, rollout, advantage[:, None].expand(B, R).contiguous(), mask


@pytest.fixture(scope="module")
def loss_of():
    """Return loss_of(settings, new, rollout, advantage, mask, mode) of verl's registry."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    import onepolicy.integrations.verl  # noqa: F401 (registers the loss)

    def loss_of(settings, new, rollout, advantage, mask, mode):
        settings = dict(settings)
        name, policy_loss = settings.pop("loss_mode"), {}
        if name == "bypass_mode":
            policy_loss["rollout_correction"], settings = settings, {}
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=2,
            policy_loss={"loss_mode": name} | policy_loss,
            use_torch_compile=False,
            **settings,
        )
        loss, _ = get_policy_loss_fn(name)(
            old_log_prob=rollout,
            log_prob=new,
            advantages=advantage,
            response_mask=mask.float(),
            loss_agg_mode=mode,
            config=config,
        )
        return loss

    return loss_of


@pytest.fixture
def configured(request):
    from onepolicy.integrations.verl import policy_loss

    policy_loss.configure(preset(request.param))
    yield request.param
    policy_loss.configure(None)


def gradient(loss, new):
    (found,) = torch.autograd.grad(loss, new)
    return found


def averaged(values, mask, mode):
    """Return the three means, written out."""
    sums = (values * mask).sum(1)
    if mode == "token-mean":
        return sums.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return (sums / mask.sum(1)).mean()
    return sums.mean()


def test_every_live_preset_is_compared_or_refused():
    live = {name for name in correction_presets() if preset(name).live}
    centred = {name for name in live if preset(name).centering != "none"}
    assert live - centred == set(BY_HAND)  # test_driver.py has that the others are refused


@pytest.mark.parametrize("configured", BY_HAND, indirect=True)
def test_the_loss_is_the_one_by_hand(loss_of, batch, configured, subtests):
    new, rollout, advantage, mask = batch
    new = new.clone().requires_grad_()
    for mode in MODES:
        with subtests.test(mode=mode):
            expected = averaged(BY_HAND[configured](new, rollout, advantage, mask), mask, mode)
            wanted = gradient(expected, new)
            found = loss_of({"loss_mode": "onepolicy"}, new, rollout, advantage, mask, mode)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # weights are float32
            torch.testing.assert_close(gradient(found, new), wanted, rtol=1e-6, atol=1e-12)
            uncorrected = averaged(clipped((new - new.detach()).exp(), advantage), mask, mode)
            assert not torch.allclose(wanted, gradient(uncorrected, new), rtol=1e-2)


@pytest.mark.parametrize("configured", VERLS_OWN, indirect=True)
def test_the_loss_is_verls_own_where_it_has_one(loss_of, batch, configured):
    new, rollout, advantage, mask = batch
    new = new.clone().requires_grad_()
    theirs = loss_of(VERLS_OWN[configured], new, rollout, advantage, mask, "token-mean")
    ours = loss_of({"loss_mode": "onepolicy"}, new, rollout, advantage, mask, "token-mean")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient(ours, new), gradient(theirs, new), rtol=1e-6, atol=1e-12)
