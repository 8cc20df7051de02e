"""The rollout's log-probabilities as the old policy's (numerics = on-policy): no scoring forward,
the same weights as with one, and a stop before the optimiser if a single bit differs."""

import asyncio
from dataclasses import replace

import pytest
import torch

from onepolicy.build.components import build_components
from onepolicy.config import TrainingError, load
from onepolicy.objective.advantages import compute_advantages, compute_outcomes
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import Hook, StepRunner, apply_correction, sample_rollouts
from onepolicy.train import scorer as scorer_module
from onepolicy.train.bypass import EqualScoring
from onepolicy.train.pack import pack
from onepolicy.train.scoring import ScoringFirst

SMALL = (
    "numerics=on-policy",
    "rollout.prompts_per_step=4",
    "train.tokens_per_micro_batch=64",
    "log.counterfactual_every=0",
)


def runner_of(recipe, *overrides):
    components, _ = build_components(load(str(recipe), [*SMALL, *overrides]))
    return StepRunner(components, build_hooks(components))


def weights(runner):
    return {name: w.clone() for name, w in runner.components.learner.model.named_parameters()}


def step(runner, number):
    return asyncio.run(runner.rl_step(number)).metrics


class Rewards(Hook):
    """Every second group is solved by all its samples, so that it has no advantage."""

    def after_rollout(self, groups, timer):
        return [
            replace(
                group,
                samples=[
                    replace(sample, reward=float(index % 2 or number % 2))
                    for index, sample in enumerate(group.samples)
                ],
            )
            for number, group in enumerate(groups)
        ]


def with_rewards(runner):
    return StepRunner(runner.components, [Rewards(), *runner.hooks])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_weights_are_those_of_a_run_with_a_scoring_forward(recipe, minibatches):
    count = f"objective.num_minibatches={minibatches}"
    ours, first = (with_rewards(runner_of(recipe, count)) for _ in range(2))
    learner = first.components.learner
    assert isinstance(ours.components.learner.scoring, EqualScoring)
    learner.scoring = ScoringFirst(learner.scorer)
    for number in range(2):
        ours_found, found = step(ours, number), step(first, number)
        for name in sorted(found):
            if not name.startswith(("time/", "train/tokens_per_second", "memory/")):
                assert ours_found[name] == found[name], name
        assert ours_found["mismatch/differing"] == 0.0
    expected = weights(first)
    for name, weight in weights(ours).items():
        assert torch.equal(weight, expected[name]), name


def test_no_sample_is_computed_twice(recipe, monkeypatch):
    runner = with_rewards(runner_of(recipe))
    computed = []
    forward = scorer_module.forward

    def counting(model, micro, *args, **options):
        computed.append(micro.num_samples)
        return forward(model, micro, *args, **options)

    monkeypatch.setattr(scorer_module, "forward", counting)
    step(runner, 0)
    rollout = runner.components.config.rollout
    assert len(computed) > 2
    assert sum(computed) == rollout.prompts_per_step * rollout.group_size


@pytest.mark.parametrize(
    ("minibatches", "preset"), [(1, "recompute"), (2, "recompute"), (2, "ppo-is")]
)
def test_one_bit_of_any_sample_stops_the_step_before_the_optimiser(
    recipe, subtests, minibatches, preset
):
    """Of a group that trains, of one without advantage, of the last minibatch."""
    settings = f"objective.num_minibatches={minibatches}", f"correction.preset={preset}"
    runner = with_rewards(runner_of(recipe, *settings))
    config, learner = runner.components.config, runner.components.learner
    asyncio.run(runner.rl_step(0))
    before, updates = weights(runner), learner.updates

    class OneBit(Hook):
        group = 0

        def after_rollout(self, groups, timer):
            chosen = groups[self.group]
            *others, sample = chosen.samples
            slot, logp = int(sample.trainable.nonzero()[-1]), sample.logp_rollout.clone()
            logp[slot] = torch.nextafter(logp[slot], logp.new_tensor(-9.0))
            planted = replace(chosen, samples=[*others, replace(sample, logp_rollout=logp)])
            return [*groups[: self.group], planted, *groups[self.group + 1 :]]

    planted = OneBit()
    runner = StepRunner(runner.components, [planted, *runner.hooks])
    for group in range(config.rollout.prompts_per_step):
        with subtests.test(group=group):
            planted.group = group
            with pytest.raises(TrainingError, match=r"step 2: 1 of \d+ log-probabilities differ"):
                asyncio.run(runner.rl_step(1))
            assert learner.updates == updates
            for name, weight in weights(runner).items():
                assert torch.equal(weight, before[name]), name
            learner.optimizer.zero_grad(set_to_none=True)


def test_one_route_of_any_minibatch_stops_the_step_before_the_optimiser(recipe, subtests):
    """The route of a token that is not the last one, in one layer, of one sample of each group."""
    runner = runner_of(recipe, "objective.num_minibatches=2")
    learner = runner.components.learner

    class OneRoute(Hook):
        group = 0

        def after_rollout(self, groups, timer):
            chosen = groups[self.group]
            *others, sample = chosen.samples
            slot, routing = int(sample.trainable.nonzero()[-1]), sample.routing
            ids = routing.ids.clone()
            unused = set(range(routing.num_experts)) - set(ids[slot, 0].tolist())
            ids[slot, 0, 0] = min(unused)
            moved = replace(sample, routing=replace(routing, ids=ids))
            planted = replace(chosen, samples=[*others, moved])
            return [*groups[: self.group], planted, *groups[self.group + 1 :]]

    planted = OneRoute()
    runner = StepRunner(runner.components, [planted, *runner.hooks])
    for group in range(runner.components.config.rollout.prompts_per_step):
        with subtests.test(group=group):
            planted.group = group
            with pytest.raises(TrainingError, match=r"log-probabilities differ|other experts"):
                asyncio.run(runner.rl_step(0))
            assert learner.updates == 0
            learner.optimizer.zero_grad(set_to_none=True)


def test_scores_of_a_batch_are_its_rollouts_until_the_update(recipe):
    """A loss that reads `logp_old` before the update reads the rollout's."""
    runner = runner_of(recipe)
    config, learner = runner.components.config, runner.components.learner
    rollouts = asyncio.run(sample_rollouts(runner.components, 0))
    batch = pack(compute_outcomes(rollouts.groups, config.objective, max_tokens=64))
    scored = learner.score(batch)
    assert scored.logp_old is batch.logp_rollout
    finished = compute_advantages(scored, config.objective)
    finished, _ = apply_correction(
        finished, runner.components.correction, config.objective.reduction
    )
    _, after = learner.step(finished)
    assert after.num_samples == batch.num_samples
    mask = batch.trainable
    assert torch.equal(after.logp_old[mask], batch.logp_rollout[mask])
    assert after.entropy[mask].min() > 0
    assert torch.equal(after.advantage, finished.advantage)
