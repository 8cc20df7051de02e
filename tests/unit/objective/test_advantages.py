"""Baselines, normalisation, GAE, value loss, reward shaping and dynamic sampling, worked by
hand."""

import asyncio
import math
from itertools import product

import pytest
import torch

from onepolicy.config import ObjectiveConfig, RolloutConfig, TrainingError, UsageError
from onepolicy.interfaces import Problem
from onepolicy.objective.advantages import (
    compute_advantages,
    compute_outcomes,
    has_signal,
    overlong_reward,
    whiten,
)
from onepolicy.objective.gae import gae, value_loss
from onepolicy.rollout import collect as collecting
from onepolicy.types import Sampling
from support.objective_batches import batch, group

KL = {"coef": 2.0, "where": "reward", "estimator": "k1"}


def outcomes(rewards, **config):
    """Return the outcomes of one group with these rewards."""
    (made,) = compute_outcomes([group(rewards)], ObjectiveConfig.model_validate(config))
    return [sample.outcome for sample in made.samples]


def advantages(made, **config):
    return compute_advantages(made, ObjectiveConfig.model_validate(config)).advantage.tolist()


def all_trainable(lengths, outcome):
    return batch(lengths, torch.ones(sum(lengths), dtype=torch.bool), outcome)


# --- baselines ------------------------------------------------------------------------------------
def test_leave_one_out_by_hand():
    """Rewards 0, 0, 1, 3: the others' means are 4/3, 4/3, 1, 1/3."""
    found = outcomes([0, 0, 1, 3], baseline="leave-one-out", normalise="none")
    assert found == pytest.approx([-4 / 3, -4 / 3, 0, 8 / 3])


def test_without_a_baseline_the_outcome_is_the_reward():
    config = ObjectiveConfig(baseline="none", normalise="none")
    made = compute_outcomes([group([2, 2]), group([1])], config)
    assert [sample.outcome for each in made for sample in each.samples] == [2, 2, 1]


def test_whitening_by_hand():
    """1, 2, 3 have mean 2 and variance 1. The garbage between them is not trainable."""
    found = whiten(torch.tensor([1, math.nan, 2, 3.0]), torch.tensor([True, False, True, True]))
    assert found.tolist() == pytest.approx([-1, 0, 0, 1])
    assert whiten(torch.full((3,), 0.7), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_reinforce_plus_plus_baseline_is_group_mean_then_whitening():
    """Outcomes 1, -1 on three and one slots have mean .5 and variance 1."""
    preset = "reinforce++-baseline"
    assert outcomes([3, 1], preset=preset) == [1, -1]
    found = advantages(all_trainable([3, 1], [1.0, -1.0]), preset=preset)
    assert found == pytest.approx([0.5, 0.5, 0.5, -1.5])


def test_kl_in_the_reward_of_a_response():
    """k1 per token (.1, .3 | .2), coef 2. REINFORCE: returns to go. RLOO: rewards minus sums, then
    compared."""
    logp = torch.tensor([-1.0, -1, -1])
    made = all_trainable([2, 1], [1.0, 0.0]).replace(
        logp_old=logp, logp_ref=logp - torch.tensor([0.1, 0.3, 0.2])
    )
    alone = advantages(made, baseline="none", normalise="none", kl=KL)
    assert alone == pytest.approx([1 - 0.8, 1 - 0.6, -0.4])
    rloo = {"baseline": "leave-one-out", "normalise": "none", "kl": KL}
    assert outcomes([1, 0], **rloo) == [1, 0]  # compute_advantages compares
    compared = advantages(made.replace(group=torch.zeros(2, dtype=torch.int64)), **rloo)
    assert compared == pytest.approx([0.6, 0.6, -0.6])  # 1 - .8 against 0 - .4
    rewritten = all_trainable([1, 1, 1], [1.0, 1.0, 0.0]).replace(
        logp_old=made.logp_old,
        logp_ref=made.logp_ref,
        group=torch.zeros(3, dtype=torch.int64),
        episode=torch.tensor([0, 0, 1]),  # the first has two samples
    )
    assert advantages(rewritten, **rloo) == pytest.approx([0.6, 0.6, -0.6])


# --- returns, GAE, value loss ---------------------------------------------------------------------
def gae_of(reward, value, mask, segment=None, samples=1, gamma=0.9, lam=0.5):
    reward, value, mask = torch.tensor(reward).float(), torch.tensor(value), torch.tensor(mask)
    segment = torch.tensor(segment or [0] * len(reward))
    how = {"segment": segment, "samples": samples, "gamma": gamma, "lam": lam}
    return gae(reward, value, mask=mask, **how).tolist()


def test_returns_to_go_skip_untrainable_slots():
    mask, segment = [True, False, True, True], [0, 0, 0, 1]
    found = gae_of([1.0, 9, 2, 4], [0.0] * 4, mask, segment, samples=2, gamma=0.5, lam=1.0)
    assert found == [2, 0, 2, 4]


def test_gae_by_hand():
    """delta = (.9 * .4 - .5, .9 * .2 - .4, 1 - .2) = (-.14, -.22, .8); A = (-.14 + .45 * .14, -.22
    + .45 * .8, .8)."""
    assert gae_of([0, 0, 1], [0.5, 0.4, 0.2], [True] * 3) == pytest.approx([-0.077, 0.14, 0.8])
    gap = gae_of([0, 7, 0, 1, 7], [0.5, 9, 0.4, 0.2, 9], [True, False, True, True, False])
    assert gap == pytest.approx([-0.077, 0, 0.14, 0.8, 0])


def test_gae_of_packed_samples_is_that_of_each_alone(subtests):
    for seed, gamma, lam in product(range(3), [0.5, 0.97, 1.0], [0.0, 0.9, 1.0]):
        with subtests.test(seed=seed, gamma=gamma, lam=lam):
            g = torch.Generator().manual_seed(seed)
            segment = torch.arange(4).repeat_interleave(torch.randint(1, 6, (4,), generator=g))
            n = len(segment)
            reward, value = torch.randn(2, n, generator=g)
            mask, how = torch.rand(n, generator=g) < 0.7, {"gamma": gamma, "lam": lam}
            together = gae(reward, value, mask=mask, segment=segment, samples=4, **how)
            for s in range(4):
                rows = (segment == s).nonzero()[:, 0]
                one = {"mask": mask[rows], "segment": rows * 0, "samples": 1}
                assert torch.equal(together[rows], gae(reward[rows], value[rows], **one, **how))


def test_critic_credit_whitens_the_advantage_and_not_the_return():
    value = torch.tensor([0.5, 0.4, 0.2])
    config = ObjectiveConfig(preset="ppo", gamma=0.9, lam=0.5)
    found = compute_advantages(all_trainable([3], [1.0]).replace(value=value), config)
    raw = torch.tensor([-0.077, 0.14, 0.8])
    torch.testing.assert_close(found.value_target, raw + value, rtol=1e-6, atol=1e-7)
    white = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(found.advantage, white, rtol=0, atol=1e-6)


VALUES = [  # new value, loss, slope, clipped; old value 0, return 1, clip .2
    (0.1, 0.9**2 / 2, -0.9, False),
    (0.5, 0.8**2 / 2, 0, True),  # already moved towards the return by more than the clip
    (-0.5, 1.5**2 / 2, -1.5, False),  # moved away: pulled back
]


def test_value_clip_by_hand(subtests):
    for new, loss, slope, clipped in VALUES:
        with subtests.test(new=new):
            value = torch.tensor([new], requires_grad=True)
            out, was = value_loss(value, torch.zeros(1), torch.ones(1), clip=0.2)
            out.sum().backward()
            assert out.item() == pytest.approx(loss)
            assert value.grad.item() == pytest.approx(slope)
            assert was.item() is clipped
            free, _ = value_loss(value, torch.zeros(1), torch.ones(1), clip=None)
            assert free.item() == pytest.approx((new - 1) ** 2 / 2)


# --- DAPO -----------------------------------------------------------------------------------------
def test_overlong_shaping_by_hand():
    lengths = torch.tensor([3, 16, 18, 20, 25])
    assert overlong_reward(lengths, max_tokens=20, buffer=4).tolist() == [0, 0, -0.5, -1, -1]


def test_overlong_rewards_change_the_outcome_and_not_the_reward():
    config = ObjectiveConfig(normalise="none", overlong_buffer=0.5, overlong_penalty=2.0)
    given = [group([1, 0], slots=(2, 1))]  # falls from 1 token on: -2, 0
    (made,) = compute_outcomes(given, config, max_tokens=2)
    assert [s.outcome for s in made.samples] == [-0.5, 0.5]
    assert [s.reward for s in made.samples] == [1, 0]


class Numbered:
    """An environment of problem i, whose samples have the rewards `rewards(i)`."""

    def train_problem(self, index):
        return Problem(index, str(index), f"answer {index}")


def collect(monkeypatch, solved, *, step=0, rounds=2):
    """Collect two groups of two. The problems in `solved` are partially solved, the others by no
    sample."""
    played = []

    async def play(engine, environment, problem, *_, **__):
        first = problem.id not in played
        played.append(problem.id)
        return group([float(first and problem.id in solved)]).samples

    monkeypatch.setattr(collecting, "play_episode", play)
    config = RolloutConfig(prompts_per_step=2, group_size=2)
    accept = has_signal if rounds else None
    sampling, how = Sampling(1.0, 8), {"step": step, "seed": 0, "accept": accept, "rounds": rounds}
    groups, metrics = asyncio.run(
        collecting.collect_rollouts(None, Numbered(), config, sampling, **how)
    )
    return groups, metrics, list(dict.fromkeys(played))


def test_groups_without_signal_are_replaced(monkeypatch):
    groups, metrics, played = collect(monkeypatch, {1, 2})
    assert ([g.problem_id for g in groups], played) == ([1, 2], [0, 1, 2])
    assert groups[1].answer == "answer 2"
    assert metrics == {"rollout/groups_played": 3, "rollout/groups_kept": 2, "rollout/refills": 1}


def test_refilling_has_a_bound_and_no_problem_twice(monkeypatch):
    groups, metrics, played = collect(monkeypatch, {7}, step=1)  # step 1 owns problems 6 to 11
    assert ([g.problem_id for g in groups], played) == ([7], [6, 7, 8, 9])
    assert metrics["rollout/refills"] == 2
    with pytest.raises(TrainingError, match=r"all 6 problems .* equal rewards \(0 groups"):
        collect(monkeypatch, set())


def test_without_dynamic_sampling_every_group_is_kept(monkeypatch):
    groups, metrics, played = collect(monkeypatch, set(), step=1, rounds=0)
    assert ([g.problem_id for g in groups], played, metrics) == ([2, 3], [2, 3], {})


# --- what "equal rewards" means -------------------------------------------------------------------
ROUNDED = [
    [0.1 + 0.2, 0.3],
    [0.3 - 0.2 - 0.1, 0.0],
    [1e6 * (0.1 + 0.2), 3e5],
    [float(torch.tensor(0.1)), 0.1],  # a float32 reward beside a float64 one
    [1 + 2**-22, 1.0],  # a few roundings of float32
    [-0.1 - 0.2, -0.3, -0.3],
    [0.1] * 7,
    [0.7],
]
APART = [
    [0.0, 1.0],
    [1.0, 1 + 2**-20],
    [1e6, 1e6 + 1],
    [0.0, 1e-9],
    [-1e-6, 1e-6],
    [5.0, 5.0, 4.999],
]


def test_rewards_that_differ_by_rounding_are_no_signal(subtests):
    from onepolicy.run.step import rollout_metrics

    for rewards, preset in product(ROUNDED, ["grpo", "dr-grpo", "rloo"]):
        with subtests.test(rewards=rewards, preset=preset):
            assert not has_signal(group(rewards))
            assert outcomes(rewards, preset=preset) == [0.0] * len(rewards)
            assert rollout_metrics([group(rewards)])["train/groups_without_signal"] == 1
            given = torch.tensor(rewards, dtype=torch.float64)
            assert not whiten(given, torch.ones_like(given, dtype=torch.bool)).any()


def test_rewards_that_differ_by_more_are_a_signal(subtests):
    from onepolicy.run.step import rollout_metrics

    for rewards in APART:
        with subtests.test(rewards=rewards):
            assert has_signal(group(rewards))
            assert any(outcomes(rewards, preset="dr-grpo"))
            metrics = rollout_metrics([group(rewards), group([2.0, 2.0])])
            assert metrics["train/groups_without_signal"] == 0.5
            assert metrics["train/reward_min"] == min(*rewards, 2.0)
            assert metrics["train/reward_max"] == max(*rewards, 2.0)


def test_an_infinite_reward_is_not_passed_over_as_equal():
    for rewards in ([math.inf, 1.0], [math.nan, 1.0], [math.inf, -math.inf]):
        assert has_signal(group(rewards))
        with pytest.raises(UsageError):
            outcomes(rewards)
