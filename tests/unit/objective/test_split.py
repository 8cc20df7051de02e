"""Reductions, and properties of every objective: any split adds up, masked slots do not count,
rejection has no gradient."""

import math
from itertools import product

import pytest
import torch

from onepolicy.config import ObjectiveConfig, UsageError, resolve
from onepolicy.config.presets import objective_presets
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.reweight import reweight
from onepolicy.objective.loss import loss_weights, policy_loss
from support.objective_batches import batch, random_batch

PRESETS = list(objective_presets())
REDUCTIONS = {  # shares of samples of 2, 1 and 1 trainable slots; the first two are of one prompt
    "token-mean": [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4],
    "prompt-mean": [1 / 6, 0, 1 / 6, 1 / 6, 1 / 2],
    "episode-mean": [1 / 6, 0, 1 / 6, 1 / 3, 1 / 3],
    "sequence-mean-token-mean": [1 / 6, 0, 1 / 6, 1 / 3, 1 / 3],
    "sequence-mean-token-sum": [1 / 3, 0, 1 / 3, 1 / 3, 1 / 3],
    "sequence-mean-token-constant": [1 / 33, 0, 1 / 33, 1 / 33, 1 / 33],
}
MINIMAL = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}
TERMS = {"kl": {"coef": 0.3, "importance": "rollout"}, "entropy_coef": 0.1}
MAX_TOKENS = 11


def objective(**settings):
    return ObjectiveConfig.model_validate(settings)


def shares(made, **settings):
    return loss_weights(made, objective(**settings), max_tokens=MAX_TOKENS)


def made_of(seed, **settings):
    config = objective(**TERMS, **settings)
    logp_new, made = random_batch(seed, 6, config)
    return config, logp_new, made.replace(loss_weight=shares(made, **settings).double())


def run(config, logp_new, made, **how):
    """Return loss, sums and gradient. A function of logp_new replaces the entropy."""
    leaf = logp_new.clone().requires_grad_()
    entropy = torch.where(made.trainable, leaf, 0.0).square()
    how = {"logp_behaviour": made.logp_old} | how
    loss, sums = policy_loss(leaf, made, config=config, entropy=entropy, **how)
    loss.backward()
    return loss.item(), {name: value.item() for name, value in sums.items()}, leaf.grad


def one_sample(logp_old, **fields):
    """Return a sample of trainable slots with advantage, weight and loss weight 1."""
    count = len(logp_old)
    ones, trainable = torch.ones(count), torch.ones(count, dtype=torch.bool)
    plain = {"advantage": ones, "weight": ones, "loss_weight": ones, "keep": trainable}
    made = batch([count], trainable, [0.0])
    return made.replace(logp_old=torch.tensor(logp_old), **plain | fields)


def test_shares_by_hand(subtests):
    made = batch([3, 1, 1], torch.tensor([True, False, True, True, True]), [0.0, 0, 0])
    for reduction, expected in REDUCTIONS.items():
        with subtests.test(reduction=reduction):
            assert shares(made, reduction=reduction).tolist() == pytest.approx(expected)
    constant = {"reduction": "sequence-mean-token-constant", "reduction_length": 4}
    assert shares(one_sample([0.0, 0.0]), **constant).tolist() == [0.25, 0.25]


def test_an_episode_of_several_samples_counts_once():
    """Samples of 2, 1, 1 and 1 slots belong to two prompts. The first two are one episode, the
    others have theirs."""
    episode = torch.tensor([0, 0, 0, 1])
    made = batch([2, 1, 1, 1], torch.ones(5, dtype=torch.bool), [0.0] * 4, episode=episode)
    found = shares(made, reduction="episode-mean").tolist()
    assert found == pytest.approx([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 3])


def test_any_split_into_micro_batches_adds_up(subtests):
    choices = [{"preset": name} for name in PRESETS] + [{"reduction": name} for name in REDUCTIONS]
    for settings, seed in product(choices, range(5)):
        with subtests.test(**settings, seed=seed):
            config, logp_new, made = made_of(seed, **settings)
            loss, sums, grad = run(config, logp_new, made)
            order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
            total, gathered, added = 0.0, torch.zeros_like(grad), dict.fromkeys(sums, 0.0)
            for chosen in (order[part :: seed + 1] for part in range(seed + 1)):
                slots = made.slots_of(chosen)
                part, values, gathered[slots] = run(config, logp_new[slots], made.select(chosen))
                total += part
                added = {key: added[key] + values[key] for key in added}
            assert total == pytest.approx(loss, abs=1e-12)
            torch.testing.assert_close(gathered, grad, rtol=1e-10, atol=1e-14)
            assert added == pytest.approx(sums)


def test_garbage_outside_the_trainable_slots_changes_no_bit(subtests):
    fields = ("logp_old", "logp_ref", "logp_rollout", "weight", "advantage")
    for name, garbage in product(PRESETS, [math.nan, math.inf, -math.inf, 1e9, -1e9]):
        with subtests.test(name=name, garbage=garbage):
            config, logp_new, made = made_of(7, preset=name)
            clean, gone = run(config, logp_new, made), ~made.trainable
            assert gone.any()
            dirty = {field: getattr(made, field).masked_fill(gone, garbage) for field in fields}
            found = run(config, logp_new.masked_fill(gone, -garbage), made.replace(**dirty))
            assert found[:2] == clean[:2]
            assert torch.equal(found[2], clean[2])
            assert (found[2][gone] == 0).all()


def test_a_fully_rejected_batch_keeps_the_protected_terms(subtests):
    for name in PRESETS:
        with subtests.test(name=name):
            config, logp_new, made = made_of(5, preset=name)
            made = made.replace(keep=torch.zeros_like(made.trainable))
            nothing, kl, entropy, both = (
                run(config, logp_new, made, protect=terms)
                for terms in ((), ("kl",), ("entropy",), ("kl", "entropy"))
            )
            assert nothing[0] == 0
            assert (nothing[2] == 0).all()
            assert not any(nothing[1].values())
            assert kl[0] > 0 > entropy[0]
            assert both[0] == pytest.approx(kl[0] + entropy[0])


def test_a_rejected_slot_stays_in_the_ratio_of_its_sample():
    """r = (1.21, 1): s = 1.1 also if the first slot is rejected, and its log p still has half the
    gradient of s."""
    made = one_sample([-1 - math.log(1.21), -1.0], keep=torch.tensor([False, True]))
    loss, _, grad = run(objective(ratio_level="sequence"), torch.full((2,), -1.0), made)
    assert loss == pytest.approx(-1.1)
    assert grad.tolist() == pytest.approx([-1.1 / 2] * 2)


def test_a_rejected_slot_is_clipped_by_the_sign_of_its_sample():
    """GMPO, A = 1, r = (4, 2/3): 4 is clipped to 1.5 and has no gradient, rejected or not;
    exp(mean) is 1."""
    logp_old = [-1 - math.log(4), -1 + math.log(1.5)]
    made = one_sample(logp_old, keep=torch.tensor([False, True]))
    config = objective(surrogate="gmpo", clip_low=0.2, clip_high=0.5)
    loss, _, grad = run(config, torch.full((2,), -1.0), made)
    assert loss == pytest.approx(-1)
    assert grad.tolist() == pytest.approx([0, -1 / 2])


def test_kl_and_entropy_by_hand():
    """One slot, log pi = -1, reference -1 - log 2, ratio new / rollout 1/2: 3 * (log 2 - 1/2) / 2 -
    5 * .7."""
    made = one_sample(
        [-1.0],
        logp_ref=torch.tensor([-1 - math.log(2)]),
        logp_rollout=torch.tensor([-1 + math.log(2)]),
        advantage=torch.zeros(1),
        weight=torch.full((1,), 9.0),  # not for these terms
    )
    config = objective(kl={"coef": 3.0, "importance": "rollout"}, entropy_coef=5.0)
    new, entropy = torch.tensor([-1.0]), torch.tensor([0.7])
    behaviour = made.logp_old
    loss, sums = policy_loss(new, made, config=config, logp_behaviour=behaviour, entropy=entropy)
    kl = (math.log(2) - 0.5) / 2
    assert loss.item() == pytest.approx(3 * kl - 5 * 0.7)
    assert sums["kl"].item() == pytest.approx(kl)


# --- every objective with every correction --------------------------------------------------------
def test_every_objective_runs_with_every_correction_or_is_refused(subtests):
    """Old / rollout corrections combine with all (the TIS slides). With new / rollout, ppo-is needs
    a ratio, pg-tis none."""
    corrections = ("off", "tis", "mis", "icepop", "opsm", "ppo-is", "pg-tis")
    for name, correction in product(PRESETS, corrections):
        with subtests.test(name=name, correction=correction):
            both = [f"objective.preset={name}", f"correction.preset={correction}"]
            wants_ratio = {"pg-tis": False, "ppo-is": True}.get(correction)
            if wants_ratio is (name in ("rloo", "reinforce")):
                with pytest.raises(UsageError, match=f"correction: {correction}"):
                    resolve(MINIMAL, both)
            else:
                check_a_step(resolve(MINIMAL, both))


def check_a_step(settings):
    config, part = settings.objective, settings.correction
    logp_new, made = random_batch(3, 6, config)
    loss_weight = loss_weights(made, config, max_tokens=MAX_TOKENS).double()
    behaviour = made.logp_old if settings.scores_old else made.logp_rollout
    mask, about = made.trainable, {"segment": made.segment, "advantage": made.advantage}
    fixed = reweight(behaviour, made.logp_rollout, mask, part.fixed_part, **about)
    weight, keep = fixed.weight, fixed.keep
    if part.live_part is not None:
        live = live_weights(logp_new, made.logp_rollout, mask, part.live_part, **about)
        weight, keep = weight * live.weight, keep & live.keep
    made = made.replace(loss_weight=loss_weight, weight=weight, keep=keep)
    how = {"logp_behaviour": behaviour, "protect": part.protect}
    loss, _, grad = run(config, logp_new, made, **how)
    assert math.isfinite(loss)
    assert grad.isfinite().all()
    assert (grad[mask] != 0).any()
    assert (grad[~mask] == 0).all()


def test_bypass_takes_the_mismatch_for_the_policy_ratio(subtests):
    """The Miles post's bypass at theta = theta_old: r = rho, so PPO clips moves that no update has
    made.

    The value is -d loss / d log pi with clip .2, where A = 1 (positive) and A = -1 (negative).
    """
    for rho, positive, negative in ((0.25, 0.25, 0), (1.5, 0, -1.5), (4.0, 0, -4), (10, 0, -10)):
        for advantage, expected in ((1.0, positive), (-1.0, negative)):
            with subtests.test(rho=rho, advantage=advantage):
                made = one_sample([0.0], advantage=torch.tensor([advantage]))
                rollout = torch.tensor([-1 - math.log(rho)])
                config, new = objective(clip_high=0.2), torch.tensor([-1.0])
                *_, grad = run(config, new, made, logp_behaviour=rollout)
                assert -grad.item() == pytest.approx(expected)


def test_decoupled_form_has_three_policies():
    """The Miles post: (old / rollout) min(r A, clip(r) A), r = new / old. rho = 1.5, r = 1.1, A =
    2: -3.3."""
    old, tis = torch.tensor([-1.0]), resolve(MINIMAL, ["correction.preset=tis"]).correction
    applied = reweight(old, old - math.log(1.5), torch.tensor([True]), tis)
    made = one_sample([-1.0], advantage=torch.tensor([2.0]), weight=applied.weight)
    loss, _, _ = run(objective(), old + math.log(1.1), made.replace(keep=applied.keep))
    assert loss == pytest.approx(-1.5 * 1.1 * 2)
