"""Rescoring over a part of the vocabulary, beside the model's own probabilities."""

import pytest
import torch

from onepolicy.train.rescore import OUTSIDE, Rescorer, fit_support, logp_of
from support.learner_steps import batch_of, learner_of


@pytest.fixture(scope="module", params=[10**6, 40], ids=["one forward", "several"])
def scorer(request):
    """With shared prompts a forward has the samples of whole groups."""
    parts = f"train.tokens_per_micro_batch={request.param}", "train.share_prompts=true"
    return learner_of("replay.mode=off", *parts, routed=False).scorer


def logits_of(scorer, batch):
    """Return the tempered logits [n, V] of the trainable slots, in float64."""
    found = torch.zeros(batch.num_slots, scorer.vocab_size, dtype=torch.float64)
    for chosen in scorer.micro_batches(batch):
        micro, slots = batch.select(chosen), batch.slots_of(chosen)
        with torch.no_grad():
            logits = scorer.logits(micro, micro.trainable.nonzero()[:, 0])
        found[slots[micro.trainable]] = logits.double()
    return found[batch.trainable]


def sampled_from(scorer, batch, rank):
    """Return the batch with a token of this rank, 0 the likeliest, at every trainable slot. The
    first rank is 0, so that no rounding of a tie decides. Inputs stay as they are."""
    order = logits_of(scorer, batch).argsort(-1, descending=True)
    targets = batch.target_ids.clone()
    targets[batch.trainable] = order.gather(1, rank[:, None])[:, 0].to(targets.dtype)
    return batch.replace(target_ids=targets)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_inside_a_bound_are_likelier_and_others_lose_twenty_nats(scorer, temperature):
    batch = batch_of(temperature)
    n = int(batch.trainable.sum())
    rank = torch.arange(n) % 4
    batch = sampled_from(scorer, batch, rank)
    ordered = logits_of(scorer, batch).sort(-1, descending=True).values
    inside = rank < 3
    lowered = torch.where(
        torch.arange(ordered.shape[1]) < 3, ordered, ordered - OUTSIDE / temperature
    )
    expected = lowered.log_softmax(-1).gather(1, rank[:, None])[:, 0]
    found = logp_of(Rescorer(scorer, top_k=3)(batch))[batch.trainable].double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    whole = logp_of(Rescorer(scorer)(batch))[batch.trainable].double()
    plain = ordered.log_softmax(-1).gather(1, rank[:, None])[:, 0]
    torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-4)
    assert (found > whole)[inside].all()
    assert (found < whole - OUTSIDE / 2)[~inside].all()


def test_the_smallest_support_that_holds_every_token_is_found(scorer):
    batch = batch_of()
    n = int(batch.trainable.sum())
    batch = sampled_from(scorer, batch, torch.arange(n) % 4)
    ordered = logits_of(scorer, batch).softmax(-1).sort(-1, descending=True).values
    four = ordered[:, :4].sum(1)
    at = ordered.gather(1, (torch.arange(n) % 4)[:, None])[:, 0]
    rollout = torch.full_like(batch.logp_rollout, torch.nan)
    rollout[batch.trainable] = (at / four).log().float()
    batch = batch.replace(logp_rollout=rollout)
    rescorer = Rescorer(scorer)
    fitted, scored = fit_support(rescorer, rescorer(batch))
    assert (fitted.top_k, fitted.top_p) == (4, 1.0)
    torch.testing.assert_close(
        logp_of(scored)[batch.trainable], rollout[batch.trainable], rtol=1e-4, atol=1e-4
    )
    only = sampled_from(scorer, batch, torch.zeros(n, dtype=torch.int64))
    fitted, _ = fit_support(rescorer, rescorer(only))
    assert (fitted.top_k, fitted.support) in ((1, "top-k 1"), (0, "top-p 0.000"))
