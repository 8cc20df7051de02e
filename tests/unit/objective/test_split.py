"""Reductions, and properties of every objective: any split adds up, masked slots do not count,
rejection has no gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError, resolve
from onepolicy.config.objective import objective_presets
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.weights import reweight
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.types import TokenBatch
from support.objective_batches import batch, random_batch

PRESETS = list(objective_presets())
REDUCTIONS = (
    "token-mean",
    "prompt-mean",
    "episode-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-constant",
)
EXTRA = {"kl": {"coef": 0.3, "importance": "rollout"}, "entropy_coef": 0.1}
MAX_TOKENS = 11


def made_of(name: str, seed: int, **settings: Any) -> tuple[ObjectiveConfig, Tensor, TokenBatch]:
    config = ObjectiveConfig.model_validate({"preset": name, **EXTRA, **settings})
    logp_new, made = random_batch(seed, 6, config)
    return (
        config,
        logp_new,
        made.replace(loss_weight=loss_weights(made, config, max_tokens=MAX_TOKENS).double()),
    )


def run(
    config: ObjectiveConfig, logp_new: Tensor, made: TokenBatch
) -> tuple[float, dict[str, float], Tensor]:
    """Return loss, sums and gradient. A function of logp_new replaces the entropy."""
    leaf = logp_new.clone().requires_grad_()
    entropy = torch.where(made.trainable, leaf, 0.0).square()
    loss, sums = policy_loss(leaf, made, config=config, entropy=entropy)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), {name: value.item() for name, value in sums.items()}, leaf.grad


@pytest.mark.parametrize(
    ("reduction", "shares"),
    [  # samples of 2, 1 and 1 trainable slots; the first two are of one prompt
        ("token-mean", [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
        ("prompt-mean", [1 / 6, 0, 1 / 6, 1 / 6, 1 / 2]),
        ("episode-mean", [1 / 6, 0, 1 / 6, 1 / 3, 1 / 3]),
        ("sequence-mean-token-mean", [1 / 6, 0, 1 / 6, 1 / 3, 1 / 3]),
        ("sequence-mean-token-sum", [1 / 3, 0, 1 / 3, 1 / 3, 1 / 3]),
        ("sequence-mean-token-constant", [1 / 33, 0, 1 / 33, 1 / 33, 1 / 33]),
    ],
)
def test_shares_by_hand(reduction: Any, shares: list[float]) -> None:
    made = batch([3, 1, 1], torch.tensor([True, False, True, True, True]), [0.0, 0, 0])
    config = ObjectiveConfig(reduction=reduction)
    assert loss_weights(made, config, max_tokens=MAX_TOKENS).tolist() == pytest.approx(shares)


def test_an_episode_of_several_samples_counts_once() -> None:
    """Samples of 2, 1, 1 and 1 slots belong to two prompts. The first two are one episode, the
    others have theirs."""
    made = batch(
        [2, 1, 1, 1], torch.ones(5, dtype=torch.bool), [0.0] * 4, episode=torch.tensor([0, 0, 0, 1])
    )
    shares = loss_weights(made, ObjectiveConfig(reduction="episode-mean"), max_tokens=MAX_TOKENS)
    assert shares.tolist() == pytest.approx([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 3])


def test_the_constant_may_be_set() -> None:
    made = batch([2], torch.tensor([True, True]), [0.0])
    config = ObjectiveConfig(reduction="sequence-mean-token-constant", reduction_length=4)
    assert loss_weights(made, config, max_tokens=MAX_TOKENS).tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "reduction"), [(n, None) for n in PRESETS] + [("grpo", r) for r in REDUCTIONS]
)
@given(seed=st.integers(0, 10**6), parts=st.integers(1, 5))
@settings(max_examples=6, deadline=None)
def test_any_split_into_micro_batches_adds_up(
    name: str, reduction: str | None, seed: int, parts: int
) -> None:
    config, logp_new, made = made_of(name, seed, **({"reduction": reduction} if reduction else {}))
    loss, sums, grad = run(config, logp_new, made)
    order = torch.randperm(made.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    total, gathered, added = 0.0, torch.zeros_like(grad), dict.fromkeys(sums, 0.0)
    for chosen in (order[p::parts] for p in range(parts)):
        slots = made.slots_of(chosen)
        part, values, gathered[slots] = run(config, logp_new[slots], made.select(chosen))
        total += part
        added = {key: added[key] + values[key] for key in added}
    assert total == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(gathered, grad, rtol=1e-10, atol=1e-14)
    assert added == pytest.approx(sums)


@pytest.mark.parametrize("name", PRESETS)
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e9]))
@settings(max_examples=5, deadline=None)
def test_garbage_outside_the_trainable_slots_changes_no_bit(
    name: str, seed: int, garbage: float
) -> None:
    config, logp_new, made = made_of(name, seed)
    clean, gone = run(config, logp_new, made), ~made.trainable
    fields = ("logp_old", "logp_ref", "logp_rollout", "weight", "advantage")
    dirty = made.replace(
        **{field: getattr(made, field).masked_fill(gone, garbage) for field in fields}
    )
    found = run(config, logp_new.masked_fill(gone, garbage), dirty)
    assert found[:2] == clean[:2]
    assert torch.equal(found[2], clean[2])
    assert (found[2][gone] == 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_a_fully_rejected_batch_keeps_the_protected_terms(name: str) -> None:
    config, logp_new, made = made_of(name, 5)
    made = made.replace(keep=torch.zeros_like(made.trainable))
    leaf = logp_new.clone().requires_grad_()
    loss, sums = policy_loss(leaf, made, config=config, entropy=leaf * leaf, protect=())
    loss.backward()
    assert leaf.grad is not None
    assert loss == 0
    assert (leaf.grad == 0).all()
    assert all(value == 0 for value in sums.values())
    losses = [  # each term still sees the slots if it is protected
        policy_loss(logp_new, made, config=config, entropy=logp_new * logp_new, protect=terms)[
            0
        ].item()
        for terms in ((), ("kl",), ("entropy",), ("kl", "entropy"))
    ]
    assert losses[1] > 0 > losses[2]
    assert losses[3] == pytest.approx(losses[1] + losses[2])


def test_a_rejected_slot_stays_in_the_ratio_of_its_sample() -> None:
    """r = (1.21, 1): s = 1.1 also if the first slot is rejected, and its log p still has half the
    gradient of s."""
    made = batch([2], torch.tensor([True, True]), [0.0]).replace(
        logp_old=torch.tensor([-1 - math.log(1.21), -1.0]),
        advantage=torch.ones(2),
        weight=torch.ones(2),
        keep=torch.tensor([False, True]),
        loss_weight=torch.full((2,), 0.5),
    )
    leaf = torch.full((2,), -1.0, requires_grad=True)
    loss, _ = policy_loss(leaf, made, config=ObjectiveConfig(ratio_level="sequence"))
    loss.backward()
    assert leaf.grad is not None
    assert loss.item() == pytest.approx(-1.1 / 2)
    assert leaf.grad.tolist() == pytest.approx([-1.1 / 4] * 2)


def test_a_rejected_slot_is_clipped_by_the_sign_of_its_sample() -> None:
    """GMPO, A = 1, r = (4, 2/3): 4 is clipped to 1.5 and has no gradient, rejected or not;
    exp(mean) is 1."""
    made = batch([2], torch.tensor([True, True]), [0.0]).replace(
        logp_old=torch.tensor([-1 - math.log(4), -1 + math.log(1.5)]),
        advantage=torch.ones(2),
        weight=torch.ones(2),
        keep=torch.tensor([False, True]),
        loss_weight=torch.full((2,), 0.5),
    )
    leaf = torch.full((2,), -1.0, requires_grad=True)
    loss, _ = policy_loss(
        leaf, made, config=ObjectiveConfig(surrogate="gmpo", clip_low=0.2, clip_high=0.5)
    )
    loss.backward()
    assert leaf.grad is not None
    assert loss.item() == pytest.approx(-1 / 2)
    assert leaf.grad.tolist() == pytest.approx([0, -1 / 4])


def test_kl_and_entropy_by_hand() -> None:
    """One slot, log pi = -1, reference -1 - log 2, ratio new / rollout 1/2: 3 * (log 2 - 1/2) / 2 -
    5 * .7."""
    made = batch([1], torch.tensor([True]), [0.0]).replace(
        logp_old=torch.tensor([-1.0]),
        logp_ref=torch.tensor([-1 - math.log(2)]),
        logp_rollout=torch.tensor([-1 + math.log(2)]),
        advantage=torch.zeros(1),
        weight=torch.full((1,), 9.0),  # not for these terms
        keep=torch.tensor([True]),
        loss_weight=torch.ones(1),
    )
    config = ObjectiveConfig.model_validate(
        {"kl": {"coef": 3.0, "importance": "rollout"}, "entropy_coef": 5.0}
    )
    loss, sums = policy_loss(torch.tensor([-1.0]), made, config=config, entropy=torch.tensor([0.7]))
    kl = (math.log(2) - 0.5) / 2
    assert loss.item() == pytest.approx(3 * kl - 5 * 0.7)
    assert sums["kl"].item() == pytest.approx(kl)


# --- every objective with every correction --------------------------------------------------------

MINIMAL = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize("correction", ["off", "tis", "mis", "icepop", "opsm", "ppo-is", "pg-tis"])
@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_runs_with_every_correction_or_is_refused(
    name: str, correction: str
) -> None:
    """Old / rollout corrections combine with all (the TIS slides). With new / rollout, ppo-is needs
    a ratio, pg-tis none."""
    settings_ = [f"objective.preset={name}", f"correction.preset={correction}"]
    score_function = name in ("rloo", "reinforce")
    if (correction == "pg-tis" and not score_function) or (
        correction == "ppo-is" and score_function
    ):
        with pytest.raises(UsageError, match=f"correction: {correction}"):
            resolve(MINIMAL, settings_)
        return
    run_config = resolve(MINIMAL, settings_)
    config, part = run_config.objective, run_config.correction
    logp_new, made = random_batch(3, 6, config)
    assert made.logp_old is not None
    made = made.replace(loss_weight=loss_weights(made, config, max_tokens=MAX_TOKENS).double())
    fixed = reweight(
        made.logp_old if run_config.scores_old else made.logp_rollout,
        made.logp_rollout,
        made.trainable,
        part.fixed_part,
        segment=made.segment,
        advantage=made.advantage,
    )
    weight, keep = fixed.weight, fixed.keep
    if part.live_part is not None:
        live = live_weights(
            logp_new,
            made.logp_rollout,
            made.trainable,
            part.live_part,
            segment=made.segment,
            advantage=made.advantage,
        )
        weight, keep = weight * live.weight, keep & live.keep
    made = made.replace(weight=weight, keep=keep)
    leaf = logp_new.clone().requires_grad_()
    logp_behaviour = None if run_config.scores_old else made.logp_rollout
    loss, _ = policy_loss(
        leaf, made, config=config, logp_behaviour=logp_behaviour, protect=part.protect
    )
    loss.backward()
    assert leaf.grad is not None
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[made.trainable] != 0).any()
    assert (leaf.grad[~made.trainable] == 0).all()


@pytest.mark.parametrize(
    ("rho", "positive", "negative"), [(0.25, 0.25, 0), (1.5, 0, -1.5), (4.0, 0, -4), (10.0, 0, -10)]
)
def test_bypass_takes_the_mismatch_for_the_policy_ratio(
    rho: float, positive: float, negative: float
) -> None:
    """The Miles post's bypass at theta = theta_old: r = rho, so PPO clips moves that no update has
    made.

    The value is -d loss / d log pi with clip .2, where A = 1 (positive) and A = -1 (negative).
    """
    for advantage, expected in ((1.0, positive), (-1.0, negative)):
        made = batch([1], torch.tensor([True]), [advantage]).replace(
            advantage=torch.tensor([advantage]),
            weight=torch.ones(1),
            keep=torch.tensor([True]),
            loss_weight=torch.ones(1),
        )
        leaf = torch.tensor([-1.0], requires_grad=True)
        config = ObjectiveConfig(clip_high=0.2)
        loss, _ = policy_loss(
            leaf, made, config=config, logp_behaviour=torch.tensor([-1 - math.log(rho)])
        )
        loss.backward()
        assert leaf.grad is not None
        assert -leaf.grad.item() == pytest.approx(expected)


def test_decoupled_form_has_three_policies() -> None:
    """The Miles post: (old / rollout) min(r A, clip(r) A), r = new / old. rho = 1.5, r = 1.1, A =
    2: -3.3."""
    old = torch.tensor([-1.0])
    applied = reweight(
        old,
        old - math.log(1.5),
        torch.tensor([True]),
        resolve(MINIMAL, ["correction.preset=tis"]).correction,
    )
    made = batch([1], torch.tensor([True]), [0.0]).replace(
        logp_old=old,
        advantage=torch.tensor([2.0]),
        weight=applied.weight,
        keep=applied.keep,
        loss_weight=torch.ones(1),
    )
    loss, _ = policy_loss(old + math.log(1.1), made, config=ObjectiveConfig())
    assert loss.item() == pytest.approx(-1.5 * 1.1 * 2)
