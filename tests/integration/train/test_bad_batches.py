"""Samples that no engine can have drawn are never trained on, and gradients that are not finite
never make a step."""

import asyncio
import dataclasses

import pytest
import torch

from onepolicy.config import TrainingError, UsageError
from onepolicy.replay.checks import RoutingError
from onepolicy.rollout.collect import play_episode
from onepolicy.types import Completion, Sampling
from support.learner_steps import batch_of, learner_of, one_step
from support.models import VOCAB


def changed(batch, name, slot, value):
    tensor = getattr(batch, name).clone()
    tensor[slot] = value
    return batch.replace(**{name: tensor})


IMPOSSIBLE = [
    (("input_ids", 9, VOCAB), rf"input_ids is {VOCAB} in slot 1 of sample 1, group 0"),
    (("target_ids", 9, -1), "target_ids is -1"),
    (("outcome", 2, torch.nan), "outcome is nan in slot 0 of sample 2, group 1"),
]
"""(field, index, value): the error's words."""


def test_an_impossible_batch_is_refused_before_any_forward(monkeypatch, subtests):
    learner, batch = learner_of(), batch_of()
    monkeypatch.setattr(learner.scorer, "forward", lambda *_, **__: pytest.fail("a forward"))
    for change, words in IMPOSSIBLE:
        with subtests.test(words=words), pytest.raises(TrainingError, match=f"batch: {words}"):
            learner.score(changed(batch, *change))


def other_routes(batch, change):
    """Return the batch with other ids of experts. change: of those [T, L, K], in place."""
    ids = batch.routing.ids.clone()
    return batch.replace(routing=dataclasses.replace(batch.routing, ids=change(ids)))


def twice(ids):
    ids[9, 1] = ids[9, 1, :1]
    return ids


MALFORMED = [
    (twice, "", "twice"),
    (lambda ids: ids[:, :2], "", "layers"),
    (lambda ids: ids, "replay.mode=weights", "no combine weights"),
]
"""(change of a step's routes, setting, the error's words)."""


@pytest.mark.parametrize("more", [(), ("correction.ratio=new/rollout",)])
def test_malformed_routes_are_refused_before_any_forward(more, monkeypatch, subtests):
    """Also where the update scores by itself."""
    batch = batch_of()
    for change, setting, words in MALFORMED:
        learner = learner_of(*more, *filter(None, [setting]))
        monkeypatch.setattr(learner.scorer, "forward", lambda *_, **__: pytest.fail("a forward"))
        refused = pytest.raises((UsageError, RoutingError), match=words)
        with subtests.test(words=words), refused:
            learner.score(other_routes(batch, change))


ARRIVED = [
    ({"logp": torch.tensor([-1.0, torch.nan])}, "returned nan as the log-probability"),
    ({"logp": torch.tensor([-1.0, 2.0])}, "returned 2.0 as the log-probability"),
    ({"logp": torch.tensor([-1.0])}, "2 tokens, 1 log-probabilities and 2 versions"),
    ({"version": torch.zeros(3)}, "2 tokens, 2 log-probabilities and 3 versions"),
]


def test_an_impossible_completion_is_refused_as_it_arrives(subtests):
    versions = torch.zeros(2, dtype=torch.int32)
    right = Completion(torch.tensor([1, 2]), torch.tensor([-1.0, -2.0]), versions, "stop")

    @dataclasses.dataclass
    class Engine:
        reply: dict

        async def generate(self, *_, **__):
            return dataclasses.replace(right, **self.reply)

    class Once:
        async def episode(self, problem, sample, temperature):
            await sample([3])
            pytest.fail("the environment was given it")

    for reply, words in ARRIVED:
        seed = lambda turn: turn  # noqa: E731
        play = play_episode(Engine(reply), Once(), None, Sampling(1.0, 2), seed, name="5")
        refused = pytest.raises(TrainingError, match=f"5, turn 0: the engine .*{words}")
        with subtests.test(words=words), refused:
            asyncio.run(play)


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
    assert all(map(torch.equal, before, state(tried)))
    assert (tried.updates, tried.skipped, tried.version) == (1, 1, 2)
    with pytest.raises(TrainingError, match=r"step 3 after 1 in a row .*optim.max_skipped"):
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
    with pytest.raises(TrainingError, match="norm is nan in step 1; this update was not made"):
        one_step(learner, batch_of(), poisoned(batch_of()))
    assert all(map(torch.equal, before, state(learner)))
