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
        self.updated, forward = [], learner.scoring.update_forward

        def record_samples(samples, *rest):
            self.updated.append(samples)
            return forward(samples, *rest)

        def record_gradients(*_, **__):
            grads = [p.grad.double().flatten() for p in learner.model.parameters()]
            self.gradients = torch.cat(grads)

        learner.scoring.update_forward = record_samples
        learner.optimizer.register_step_pre_hook(record_gradients)
        scored = learner.score(batch)
        scored = scored.replace(weight=torch.ones(scored.num_slots), keep=scored.trainable.clone())
        self.scored = compute_advantages(scored, learner.config.objective)
        if advantage is not None:
            self.scored = self.scored.replace(advantage=advantage)
        self.metrics = learner.step(self.scored).metrics

    @property
    def samples(self) -> list[int]:
        return sorted(sample for samples in self.updated for sample in samples)


SEVERAL = "train.tokens_per_micro_batch=40"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "settings",
    [
        "",
        pytest.param("train.reuse_scoring_forward=false", marks=pytest.mark.full),
        pytest.param(SEVERAL, marks=pytest.mark.full),
        f"{SEVERAL} train.reuse_scoring_forward=true",
        "replay.mode=r2",
        "replay.mode=off",
        "train.activation_checkpointing=true",
        "train.share_prompts=true",
        "objective.preset=gspo",
        pytest.param("objective.preset=rloo", marks=pytest.mark.full),
    ],
)
def test_scores_metrics_and_gradients_are_those_of_all_groups(settings):
    batch = batch_of_groups(SOLVED, MIXED, SOLVED, MIXED)
    skipped, whole = (Played(batch, *settings.split(), more) for more in (ON, OFF))
    assert skipped.samples == [3, 4, 5, 9, 10, 11]
    assert whole.samples == list(range(12))
    torch.testing.assert_close(skipped.scored.logp_old, whole.scored.logp_old)
    assert torch.equal(skipped.scored.routing_native.ids, whole.scored.routing_native.ids)
    error = (skipped.gradients - whole.gradients).norm()
    assert error < 5e-6 * whole.gradients.norm()
    assert skipped.metrics == pytest.approx(whole.metrics, rel=1e-4, abs=1e-6)


def test_a_step_without_any_advantage_gives_gradients_of_zero():
    played = Played(batch_of_groups(SOLVED, SOLVED), ON)
    assert played.samples == list(range(6))
    assert not played.gradients.any()
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
    torch.testing.assert_close(played.gradients, whole.gradients, rtol=1e-4, atol=1e-7)


def test_graphs_are_kept_of_updated_samples_alone():
    learner = learner_of("objective.normalise=none", "train.reuse_scoring_forward=true", ON)
    batch, graphs = batch_of_groups(SOLVED, MIXED), []
    assert learner.scorer.micro_batches(batch) == [[3, 4, 5], [0, 1, 2]]
    learner.model.register_forward_hook(lambda _, __, out: graphs.append(out.logits.requires_grad))
    learner.score(batch)
    assert graphs == [True, False]


def test_every_group_is_trained_on_where_more_than_advantages_counts(subtests):
    assert resolve(BASE).skips_zero_advantage
    for setting in (
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
    ):
        with subtests.test(setting=setting):
            assert not resolve(BASE, [setting]).skips_zero_advantage
