"""Groups without advantages have no part in an update, and it is the same without them."""

import pytest
import torch

from onepolicy.config import resolve
from onepolicy.objective.advantages import compute_advantages
from onepolicy.train.pack import pack
from onepolicy.types import Group
from support.learner_steps import BASE, learner_of, random_sample

ON, OFF = "train.skip_zero_advantage=true", "train.skip_zero_advantage=false"
SOLVED, MIXED = (0.0, 0.0, 0.0), (1.0, 0.0, -1.0)


def batch_of_groups(*outcomes: tuple[float, ...]):
    """Return a batch of a group for each tuple, with samples of these outcomes."""
    generator = torch.Generator().manual_seed(5)
    groups = []
    for number, each in enumerate(outcomes):
        lengths = [9 + 3 * number + 2 * member for member in range(len(each))]
        samples = [random_sample(n, o, generator) for n, o in zip(lengths, each, strict=True)]
        groups.append(Group(number, tuple(samples)))
    return pack(groups)


class Played:
    """One step of a learner: its metrics, gradients, and the samples of every backward."""

    def __init__(self, batch, *settings: str, advantage=None) -> None:
        learner = learner_of("objective.normalise=none", *settings)
        self.gradients, self.updated = {}, []
        backward = learner._backward

        def record_samples(micro, samples, *more):
            self.updated.append(samples)
            backward(micro, samples, *more)

        def record_gradients(*_, **__):
            named = learner.model.named_parameters()
            self.gradients |= {name: p.grad.clone() for name, p in named}

        learner._backward = record_samples
        learner.optimizer.register_step_pre_hook(record_gradients)
        scored = learner.score(batch)
        ones = torch.ones(scored.num_slots)
        self.scored = compute_advantages(
            scored.replace(weight=ones, keep=scored.trainable.clone()), learner.config.objective
        )
        if advantage is not None:
            self.scored = self.scored.replace(advantage=advantage)
        self.metrics = learner.step(self.scored).metrics

    @property
    def samples(self) -> list[int]:
        return sorted(sample for samples in self.updated for sample in samples)

    def flat(self):
        return torch.cat([g.double().flatten() for g in self.gradients.values()])


SETTINGS = {
    "one micro-batch": [],
    "its own forward": ["train.reuse_scoring_forward=false"],
    "several micro-batches": ["train.tokens_per_micro_batch=40"],
    "all graphs": ["train.tokens_per_micro_batch=40", "train.reuse_scoring_forward=true"],
    "r2": ["replay.mode=r2"],
    "no replay": ["replay.mode=off"],
    "checkpointing": ["train.activation_checkpointing=true"],
    "shared prompts": ["train.share_prompts=true"],
    "gspo": ["objective.preset=gspo"],
    "rloo": ["objective.preset=rloo"],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_scores_metrics_and_gradients_are_those_of_all_groups(settings):
    batch = batch_of_groups(SOLVED, MIXED, SOLVED, MIXED)
    skipped, whole = (Played(batch, *settings, more) for more in (ON, OFF))
    assert skipped.samples == [3, 4, 5, 9, 10, 11]
    assert whole.samples == list(range(12))
    torch.testing.assert_close(skipped.scored.logp_old, whole.scored.logp_old)
    assert torch.equal(skipped.scored.routing_native.ids, whole.scored.routing_native.ids)
    error = (skipped.flat() - whole.flat()).norm() / whole.flat().norm()
    assert error < 5e-6
    assert skipped.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)


def test_a_step_without_any_advantage_gives_gradients_of_zero():
    played = Played(batch_of_groups(SOLVED, SOLVED), ON)
    assert played.samples == list(range(6))
    assert not played.flat().any()
    assert played.metrics["train/grad_norm"] == 0


def test_a_solved_sample_stays_with_its_group():
    played = Played(batch_of_groups(MIXED, (0.0, 2.0, 1.0)), ON)
    assert played.updated == [list(range(6))]


def test_an_advantage_that_is_not_the_outcome_is_trained_on():
    batch = batch_of_groups(SOLVED, MIXED)
    advantage = torch.where(batch.segment == 1, 0.5, 0.0)
    played = Played(batch, ON, advantage=advantage)
    assert played.samples == [0, 1, 2]
    whole = Played(batch, OFF, advantage=advantage)
    torch.testing.assert_close(played.flat(), whole.flat(), rtol=1e-4, atol=1e-7)


def test_graphs_are_kept_of_updated_samples_alone():
    learner = learner_of("objective.normalise=none", "train.reuse_scoring_forward=true", ON)
    learner.score(batch_of_groups(SOLVED, MIXED))
    assert list(learner.scoring._graphs) == [(3, 4, 5)]


@pytest.mark.parametrize(
    "setting",
    [
        "objective.entropy_coef=0.01",
        "objective.kl.coef=0.01",
        "objective.num_minibatches=2",
        "objective.normalise=global",
        "objective.preset=reinforce++",
        "objective.preset=ppo",
        "correction.ratio=new/rollout",
        "replay={mode='soft', ratio=0.5}",
        "train.ranks=2",
        OFF,
    ],
)
def test_every_group_is_trained_on_where_more_than_advantages_counts(setting):
    assert resolve(BASE).skips_zero_advantage
    assert not resolve(BASE, [setting]).skips_zero_advantage
