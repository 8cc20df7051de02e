"""Checks of an engine on a scorer with known probabilities, and of routes that are not there."""

import math
from types import SimpleNamespace

import pytest
import torch

from onepolicy.engine_check.checks import topk_share
from onepolicy.engine_check.command import check_route_shapes
from onepolicy.engine_check.supports import ORDERS, _wrong_values
from onepolicy.rollout.hf.sampler import BatchSampling
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Sampling

ROW = [0.1, 0.4, 0.2, 0.3]  # the likeliest first: 1, 3, 2, 0


def scored(targets, trainable):
    """Return a scorer that gives every slot the probabilities ROW, and a batch of two forwards.

    The second half of the slots is in the first forward.
    """
    batch = SimpleNamespace(
        trainable=torch.tensor(trainable), target_ids=torch.tensor(targets), to=lambda device: batch
    )
    batch.select = lambda chosen: scored(targets[chosen], trainable[chosen])[1]
    batch.slots_of = lambda chosen: torch.arange(len(targets))[chosen]
    half = len(targets) // 2
    scorer = SimpleNamespace(
        device="cpu",
        micro_batches=lambda batch: [slice(half, None), slice(0, half)],
        logits=lambda micro, slots: torch.tensor(ROW).log().expand(len(slots), 4),
    )
    return scorer, batch


def test_the_share_of_tokens_among_the_likeliest(subtests):
    """Of the four that are trained on, one is the likeliest, one the second, two the third."""
    scorer, batch = scored([1, 0, 3, 2, 2], [True, False, True, True, True])
    for k, share, mass in ((1, 0.25, 0.4), (2, 0.5, 0.7), (3, 1.0, 0.9)):
        with subtests.test(k=k):
            found, logs = topk_share(scorer, batch, k)
            assert found == share
            assert logs.tolist() == pytest.approx([math.log(mass)] * 4)


def test_masses_are_in_the_order_of_the_batch():
    """A forward's logits depend on its tokens; the forwards are not in the batch's order."""
    scorer, batch = scored([0, 1, 2, 3], [True] * 4)
    peaked = torch.eye(4) * 0.6 + 0.1  # the token itself has 0.7, any other 0.1
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    scorer.logits = lambda micro, slots: (
        peaked[micro.target_ids[slots]].log() * scale[micro.target_ids[slots], None]
    )
    masses = [0.7**n / (0.7**n + 3 * 0.1**n) for n in (1, 2, 3, 4)]
    assert topk_share(scorer, batch, 1)[1].exp().tolist() == pytest.approx(masses)


def pair(*, routes=True, spec="of the model", reprefill=False):
    return SimpleNamespace(
        route_spec=spec,
        config=SimpleNamespace(uses_reprefill=reprefill),
        engine=SimpleNamespace(caps=SimpleNamespace(returns_routes=routes)),
    )


def test_routes_that_are_missing_or_not_needed():
    absent = check_route_shapes(pair(routes=False), [])["routes"]
    assert (absent.name, absent.passed, absent.found) == (
        "routes",
        False,
        "the engine returns none",
    )
    assert "replay.source=reprefill" in absent.fix
    answered = SimpleNamespace(prompts=[[1]], completions=[SimpleNamespace(routing=None)])
    absent = check_route_shapes(pair(), [answered])["routes"]
    assert (absent.name, absent.passed, absent.found) == ("routes", False, "request 0 has none")
    for each, reason in ((pair(spec=None), "dense"), (pair(reprefill=True), "reprefill")):
        found = check_route_shapes(each, [answered])
        assert [(name, check.name) for name, check in found.items()] == [
            ("routes", "routes"),
            ("layers", "layers"),
        ]
        assert {check.passed for check in found.values()} == {None}
        assert reason in found["routes"].found


def test_values_of_a_set_by_hand(subtests):
    """Of {3, 7} 7 was sampled, with p = 0.75; of {5} 5."""
    sampled = [math.log(0.75), 0.0]
    done = SimpleNamespace(
        token_ids=torch.tensor([7, 5]), logp=torch.tensor(sampled, dtype=torch.float32)
    )
    cases = [
        ([[0.25, 0.75], [1.0]], None),
        ([[0.15, 0.75], [1.0]], "add up to 0.900, 0.100 from 1, as if tokens were missing"),
        ([[0.25, 1.05], [1.0]], "add up to 1.3, 0.300 from 1, as if they were of another set"),
        ([[float("nan"), 0.75], [1.0]], "from 1, as if tokens"),
        ([[0.75, 0.25], [1.0]], "the sampled tokens are others in their sets"),
    ]
    for probabilities, said in cases:
        with subtests.test(said):
            logs = [[math.log(p) for p in each] for each in probabilities]
            found = _wrong_values(SupportTrace.from_sets([[3, 7], [5]], logs), done)
            assert (found is None) == (said is None)
            assert (said or "") in (found or "")
    twice = SupportTrace(
        torch.tensor([7, 7, 5], dtype=torch.int32),
        torch.tensor([0, 2, 3]),
        torch.tensor([0.5, 0.5, 1.0]).log(),
    )
    assert _wrong_values(twice, done) == "a sampled token stands twice in its set"


def test_top_p_of_the_whole_distribution_keeps_more_than_top_p_of_what_top_k_left():
    """By hand: of 0.4, 0.3, 0.2, 0.1 top_k leaves three. Renormalised, the first two have 0.78;
    before, they have 0.7, so the third is kept too."""
    tempered = torch.tensor([[0.3, 0.1, 0.4, 0.2]]).log()
    rows = BatchSampling.from_requests([Sampling(1.0, 1, 0.75, 3)], tempered.device)
    kept = [order(tempered, rows).isfinite()[0].tolist() for order in ORDERS]
    assert kept == [[True, False, True, False], [True, False, True, True]]
