"""Samples that no engine can have drawn are never trained on, and gradients that are not finite
never make a step."""

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.rollout.collect import play_episode
from onepolicy.types import Completion, Sampling
from support.learner_steps import batch_of, learner_of, one_step
from support.models import VOCAB


@pytest.fixture(scope="module")
def learner():
    return learner_of()


def changed(batch, name, slot, value):
    tensor = getattr(batch, name).clone()
    tensor[slot] = value
    return batch.replace(**{name: tensor})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda b: changed(b, "logp_rollout", 4, torch.nan),
            "logp_rollout is nan in slot 4 of sample 0, group 0",
        ),
        (lambda b: changed(b, "logp_rollout", 4, -torch.inf), "logp_rollout is -inf"),
        (lambda b: changed(b, "logp_rollout", 4, 0.5), "logp_rollout is 0.5 .* no log-probability"),
        (
            lambda b: changed(b, "input_ids", 9, VOCAB),
            rf"input_ids is {VOCAB} in slot 1 of sample 1, group 0, but",
        ),
        (lambda b: changed(b, "target_ids", 9, -1), "target_ids is -1"),
        (
            lambda b: changed(b, "outcome", 2, torch.nan),
            "outcome is nan in slot 0 of sample 2, group 1",
        ),
        (
            lambda b: b.replace(trainable=b.trainable[:-1]),
            "trainable has 84 slots, but input_ids has 85",
        ),
        (lambda b: b.replace(routing=b.routing.at(slice(1, None))), "routing has 84 slots"),
        (lambda b: b.replace(cu_seqlens=b.cu_seqlens[:-1]), "cu_seqlens has [0-9]+ slots"),
    ],
)
def test_an_impossible_batch_is_refused_before_any_forward(learner, spoil, words, monkeypatch):
    monkeypatch.setattr(
        learner.scorer, "forward", lambda *_, **__: pytest.fail("a forward was run")
    )
    with pytest.raises(TrainingError, match=f"batch: {words}"):
        learner.score(spoil(batch_of()))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            {"logp": torch.tensor([-1.0, torch.nan])},
            "the engine returned nan as the log-probability",
        ),
        ({"logp": torch.tensor([-1.0, 2.0])}, "the engine returned 2.0 as the log-probability"),
        (
            {"logp": torch.tensor([-1.0])},
            "the engine returned 2 tokens, 1 log-probabilities and 2 versions",
        ),
        (
            {"version": torch.zeros(3, dtype=torch.int32)},
            "the engine returned 2 tokens, 2 log-probabilities and 3 versions",
        ),
    ],
)
def test_an_impossible_completion_is_refused_as_it_arrives(reply, words):
    right = Completion(
        torch.tensor([1, 2]), torch.tensor([-1.0, -2.0]), torch.zeros(2, dtype=torch.int32), "stop"
    )

    class Engine:
        async def generate(self, *_, **__):
            return dataclasses.replace(right, **reply)

    class Once:
        async def episode(self, problem, sample, temperature):
            await sample([3])
            pytest.fail("the environment was given it")

    with pytest.raises(TrainingError, match=f"problem 5, turn 0: {words}"):
        asyncio.run(
            play_episode(
                Engine(), Once(), None, Sampling(1.0, 2), lambda turn: turn, name="problem 5"
            )
        )


def poisoned(batch):
    """Return a batch whose loss and gradients are not finite."""
    return torch.full((batch.num_slots,), torch.inf)


def state(learner):
    moments = [v for s in learner.optimizer.state.values() for v in s.values()]
    return [t.clone() for t in [*learner.model.state_dict().values(), *moments]]


def test_an_update_that_is_not_finite_leaves_no_trace(caplog):
    """It is skipped: the next step equals that of a learner without it, to the bit."""
    tried, spared = learner_of("optim.max_skipped=1"), learner_of("optim.max_skipped=1")
    for each in (tried, spared):
        one_step(each, batch_of())
    before = state(tried)
    _, metrics, _ = one_step(tried, batch_of(), poisoned(batch_of()))
    assert metrics["train/updates_skipped"] == 1
    assert "1 of 1 updates of this step were skipped" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, state(tried), strict=True))
    assert (tried.updates, tried.skipped, tried.version) == (1, 1, 2)
    with pytest.raises(
        TrainingError, match=r"step 3 after 1 in a row that were skipped \(optim.max_skipped\)"
    ):
        one_step(tried, batch_of(), poisoned(batch_of()))
    tried.optimizer.zero_grad()
    spared.version = 2
    _, after, weights = one_step(tried, batch_of())
    _, expected, others = one_step(spared, batch_of())
    assert after["train/updates_skipped"] == expected["train/updates_skipped"] == 0
    assert all(torch.equal(weights[n], others[n]) for n in weights)
    assert tried.skipped == 0


def test_by_default_the_first_one_ends_the_run():
    learner = learner_of()
    before = state(learner)
    with pytest.raises(
        TrainingError, match="gradient norm is nan in step 1; this update was not made"
    ):
        one_step(learner, batch_of(), poisoned(batch_of()))
    assert all(
        torch.equal(a, b) for a, b in zip(before, state(learner)[: len(before)], strict=True)
    )
