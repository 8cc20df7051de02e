"""Baselines, normalisation, GAE, value loss, reward shaping and dynamic sampling, worked by
hand."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import ObjectiveConfig, RolloutConfig, TrainingError
from onepolicy.interfaces import Problem
from onepolicy.objective.advantages import (
    apply_group_baseline,
    compute_advantages,
    compute_outcomes,
    has_signal,
    overlong_reward,
    whiten,
)
from onepolicy.objective.gae import gae, value_loss
from onepolicy.rollout import collect as collecting
from onepolicy.types import Group, Sample
from support.objective_batches import batch, group

RLOO = ObjectiveConfig(baseline="leave-one-out", normalise="none")


def values(groups: list[Group]) -> list[float | None]:
    return [sample.outcome for made in groups for sample in made.samples]


# --- baselines ------------------------------------------------------------------------------------


def test_leave_one_out_by_hand() -> None:
    """Rewards 0, 0, 1, 3: the others' means are 4/3, 4/3, 1, 1/3."""
    assert values(compute_outcomes([group([0, 0, 1, 3])], RLOO)) == pytest.approx(
        [-4 / 3, -4 / 3, 0, 8 / 3]
    )


def test_without_a_baseline_the_outcome_is_the_reward() -> None:
    config = ObjectiveConfig(baseline="none", normalise="none")
    assert values(compute_outcomes([group([2, 2]), group([1])], config)) == [2, 2, 1]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
@settings(max_examples=40, deadline=None)
def test_leave_one_out_is_the_group_mean_scaled(rewards: list[float]) -> None:
    reward, n = torch.tensor(rewards, dtype=torch.float64), len(rewards)
    unit = torch.zeros(n, dtype=torch.int64)
    scaled = apply_group_baseline(reward, unit, ObjectiveConfig(normalise="none")) * n / (n - 1)
    torch.testing.assert_close(apply_group_baseline(reward, unit, RLOO), scaled)


def test_whitening_by_hand() -> None:
    """1, 2, 3 have mean 2 and variance 1. The garbage between them is not trainable."""
    found = whiten(torch.tensor([1, math.nan, 2, 3.0]), torch.tensor([True, False, True, True]))
    assert found.tolist() == pytest.approx([-1, 0, 0, 1])
    assert whiten(torch.full((3,), 0.7), torch.ones(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_reinforce_plus_plus_baseline_is_group_mean_then_whitening() -> None:
    """Outcomes 1, -1 on three and one slots have mean .5 and variance 1."""
    config = ObjectiveConfig(preset="reinforce++-baseline")
    (made,) = compute_outcomes([group([3, 1])], config)
    assert values([made]) == [1, -1]
    found = compute_advantages(
        batch([3, 1], torch.ones(4, dtype=torch.bool), [1.0, -1.0]), config
    ).advantage
    assert found is not None
    assert found.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5])


def test_kl_in_the_reward_of_a_response() -> None:
    """k1 per token (.1, .3 | .2), coef 2. REINFORCE: returns to go. RLOO: rewards minus sums, then
    compared."""
    logp = torch.tensor([-1.0, -1, -1])
    made = batch([2, 1], torch.ones(3, dtype=torch.bool), [1.0, 0.0]).replace(
        logp_old=logp, logp_ref=logp - torch.tensor([0.1, 0.3, 0.2])
    )
    kl = {"coef": 2.0, "where": "reward", "estimator": "k1"}
    alone = compute_advantages(
        made, ObjectiveConfig.model_validate({"baseline": "none", "normalise": "none", "kl": kl})
    )
    assert alone.advantage is not None
    assert alone.advantage.tolist() == pytest.approx([1 - 0.8, 1 - 0.6, -0.4])
    config = ObjectiveConfig.model_validate(
        {"baseline": "leave-one-out", "normalise": "none", "kl": kl}
    )
    assert values(compute_outcomes([group([1, 0])], config)) == [
        1,
        0,
    ]  # compute_advantages compares
    compared = compute_advantages(
        made.replace(group=torch.zeros(2, dtype=torch.int64)), config
    ).advantage
    assert compared is not None
    assert compared.tolist() == pytest.approx([0.6, 0.6, -0.6])  # 1 - .8 against 0 - .4


# --- returns, GAE, value loss ---------------------------------------------------------------------


def test_returns_to_go_skip_untrainable_slots() -> None:
    reward, mask = torch.tensor([1.0, 9, 2, 4]), torch.tensor([True, False, True, True])
    segment, value = torch.tensor([0, 0, 0, 1]), torch.zeros(4)
    found = gae(reward, value, mask=mask, segment=segment, samples=2, gamma=0.5, lam=1.0)
    assert found.tolist() == [2, 0, 2, 4]


def gae_of(reward: list[float], value: list[float], mask: list[bool]) -> list[float]:
    count = len(reward)
    return gae(
        torch.tensor(reward, dtype=torch.float32),
        torch.tensor(value),
        mask=torch.tensor(mask),
        segment=torch.zeros(count, dtype=torch.int64),
        samples=1,
        gamma=0.9,
        lam=0.5,
    ).tolist()


def test_gae_by_hand() -> None:
    """delta = (.9 * .4 - .5, .9 * .2 - .4, 1 - .2) = (-.14, -.22, .8); A = (-.14 + .45 * .14, -.22
    + .45 * .8, .8)."""
    assert gae_of([0, 0, 1], [0.5, 0.4, 0.2], [True] * 3) == pytest.approx([-0.077, 0.14, 0.8])
    gap = gae_of([0, 7, 0, 1, 7], [0.5, 9, 0.4, 0.2, 9], [True, False, True, True, False])
    assert gap == pytest.approx([-0.077, 0, 0.14, 0.8, 0])


@given(seed=st.integers(0, 10**6), gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_gae_of_packed_samples_is_that_of_each_alone(seed: int, gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (4,), generator=g)
    n = int(lengths.sum())
    segment = torch.arange(4).repeat_interleave(lengths)
    reward, value, mask = (
        torch.randn(n, generator=g),
        torch.randn(n, generator=g),
        torch.rand(n, generator=g) < 0.7,
    )
    together = gae(reward, value, mask=mask, segment=segment, samples=4, gamma=gamma, lam=lam)
    for s in range(4):
        rows = (segment == s).nonzero()[:, 0]
        alone = gae(
            reward[rows],
            value[rows],
            mask=mask[rows],
            segment=rows * 0,
            samples=1,
            gamma=gamma,
            lam=lam,
        )
        assert torch.equal(together[rows], alone)


def test_critic_credit_whitens_the_advantage_and_not_the_return() -> None:
    made = batch([3], torch.ones(3, dtype=torch.bool), [1.0]).replace(
        value=torch.tensor([0.5, 0.4, 0.2])
    )
    config = ObjectiveConfig(preset="ppo", gamma=0.9, lam=0.5)
    found = compute_advantages(made, config)
    assert found.advantage is not None
    assert found.value_target is not None
    raw = torch.tensor([-0.077, 0.14, 0.8])
    assert found.value_target.tolist() == pytest.approx(
        (raw + torch.tensor([0.5, 0.4, 0.2])).tolist()
    )
    assert found.advantage.tolist() == pytest.approx(
        ((raw - raw.mean()) / raw.std()).tolist(), abs=1e-6
    )


@pytest.mark.parametrize(
    ("new", "loss", "slope", "clipped"),
    [  # old value 0, return 1, clip .2
        (0.1, 0.9**2 / 2, -0.9, False),
        (0.5, 0.8**2 / 2, 0, True),  # already moved towards the return by more than the clip
        (-0.5, 1.5**2 / 2, -1.5, False),  # moved away: pulled back
    ],
)
def test_value_clip_by_hand(new: float, loss: float, slope: float, clipped: bool) -> None:
    value = torch.tensor([new], requires_grad=True)
    out, was = value_loss(value, torch.zeros(1), torch.ones(1), clip=0.2)
    out.sum().backward()
    assert value.grad is not None
    assert out.item() == pytest.approx(loss)
    assert value.grad.item() == pytest.approx(slope)
    assert was.item() is clipped
    assert value_loss(value, torch.zeros(1), torch.ones(1), clip=None)[0].item() == pytest.approx(
        (new - 1) ** 2 / 2
    )


# --- DAPO -----------------------------------------------------------------------------------------


def test_overlong_shaping_by_hand() -> None:
    lengths = torch.tensor([3, 16, 18, 20, 25])
    assert overlong_reward(lengths, max_tokens=20, buffer=4).tolist() == [0, 0, -0.5, -1, -1]


def test_overlong_rewards_change_the_outcome_and_not_the_reward() -> None:
    config = ObjectiveConfig(normalise="none", overlong_buffer=0.5, overlong_penalty=2.0)
    (made,) = compute_outcomes(
        [group([1, 0], slots=(2, 1))], config, max_tokens=2
    )  # falls from 1 token on: -2, 0
    assert [s.outcome for s in made.samples] == [-0.5, 0.5]
    assert [s.reward for s in made.samples] == [1, 0]


class Numbered:
    """An environment of problem i, whose samples have the rewards `rewards(i)`."""

    def train_problem(self, index: int) -> Problem:
        return Problem(index, str(index), f"answer {index}")


def collect(
    monkeypatch: pytest.MonkeyPatch, solved: set[int], *, step: int = 0, rounds: int = 2
) -> tuple[list[Group], dict[str, float], list[int]]:
    """Collect two groups of two. The problems in `solved` are partially solved, the others by no
    sample."""
    played: list[int] = []

    async def play(
        engine: None, environment: Numbered, problem: Problem, *_: object, **__: object
    ) -> tuple[Sample, ...]:
        first = problem.id not in played
        played.append(problem.id)
        return group([1.0 if first and problem.id in solved else 0.0]).samples

    monkeypatch.setattr(collecting, "play_episode", play)
    config = RolloutConfig(prompts_per_step=2, group_size=2)
    groups, metrics = asyncio.run(
        collecting.collect_rollouts(
            None,  # type: ignore[arg-type]
            Numbered(),  # type: ignore[arg-type]
            config,
            stop=(),
            step=step,
            seed=0,
            accept=has_signal if rounds else None,
            rounds=rounds,
        )
    )
    return groups, metrics, list(dict.fromkeys(played))


def test_groups_without_signal_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, metrics, played = collect(monkeypatch, {1, 2})
    assert ([g.problem_id for g in groups], played) == ([1, 2], [0, 1, 2])
    assert groups[1].answer == "answer 2"
    assert metrics == {"rollout/groups_played": 3, "rollout/groups_kept": 2, "rollout/refills": 1}


def test_refilling_has_a_bound_and_no_problem_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, metrics, played = collect(monkeypatch, {7}, step=1)  # step 1 owns problems 6 to 11
    assert ([g.problem_id for g in groups], played) == ([7], [6, 7, 8, 9])
    assert metrics["rollout/refills"] == 2
    with pytest.raises(TrainingError, match="all 6 problems of step 1 had equal rewards"):
        collect(monkeypatch, set())


def test_without_dynamic_sampling_every_group_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, metrics, played = collect(monkeypatch, set(), step=1, rounds=0)
    assert ([g.problem_id for g in groups], played, metrics) == ([2, 3], [2, 3], {})


# --- what "equal rewards" means -------------------------------------------------------------------

ROUNDED = [
    [0.1 + 0.2, 0.3],
    [0.3 - 0.2 - 0.1, 0.0],
    [1e6 * (0.1 + 0.2), 3e5],
    [float(torch.tensor(0.1)), 0.1],  # a float32 reward beside a float64 one
    [float(torch.full((10,), 0.1).cumsum(0)[-1]), 1.0],
    [-0.1 - 0.2, -0.3, -0.3],
    [0.7, 0.7],
    [0.7],
]
APART = [[0.0, 1.0], [1.0, 1.00001], [1e6, 1e6 + 1], [0.0, 1e-9], [-1e-6, 1e-6], [5.0, 5.0, 4.999]]


@pytest.mark.parametrize("rewards", ROUNDED)
@pytest.mark.parametrize("preset", ["grpo", "dr-grpo", "rloo"])
def test_rewards_that_differ_by_rounding_are_no_signal(rewards: list[float], preset: str) -> None:
    from onepolicy.run.step import rollout_metrics

    made = group(rewards)
    assert not has_signal(made)
    assert values(compute_outcomes([made], ObjectiveConfig(preset=preset))) == [0.0] * len(rewards)
    assert rollout_metrics([made])["train/groups_without_signal"] == 1
    assert not whiten(
        torch.tensor(rewards, dtype=torch.float64), torch.ones(len(rewards), dtype=torch.bool)
    ).any()


@pytest.mark.parametrize("rewards", APART)
def test_rewards_that_differ_by_more_are_a_signal(rewards: list[float]) -> None:
    from onepolicy.run.step import rollout_metrics

    made = group(rewards)
    assert has_signal(made)
    assert any(values(compute_outcomes([made], ObjectiveConfig(preset="dr-grpo"))))
    metrics = rollout_metrics([made, group([2.0, 2.0])])
    assert metrics["train/groups_without_signal"] == 0.5
    assert metrics["train/reward_min"] == min(*rewards, 2.0)
    assert metrics["train/reward_max"] == max(*rewards, 2.0)


@pytest.mark.parametrize("rewards", [[math.inf, 1.0], [math.nan, 1.0], [math.inf, -math.inf]])
def test_an_infinite_reward_is_not_passed_over_as_equal(rewards: list[float]) -> None:
    assert has_signal(group(rewards))
    with pytest.raises(ValueError, match="must return a finite number"):
        compute_outcomes([group(rewards)], ObjectiveConfig())
