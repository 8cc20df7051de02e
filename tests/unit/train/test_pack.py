"""Groups -> batch -> micro-batches and minibatches."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import UsageError
from onepolicy.train.pack import micro_batches, minibatches, pack
from onepolicy.types import Group, RoutingTrace, Sample


def sample(length: int, prompt: int = 2, routed: bool = True) -> Sample:
    slots = length - 1
    trainable, zeros = torch.arange(slots) >= prompt - 1, torch.zeros(slots, dtype=torch.int32)
    routing = None
    if routed:
        ids = torch.randint(0, 8, (slots, 2, 1)).to(torch.uint8)
        routing = RoutingTrace(ids, torch.ones(slots, dtype=torch.bool), (0, 1), 8)
    tokens, logp = torch.arange(length, dtype=torch.int32), torch.where(trainable, -0.5, torch.nan)
    return Sample(tokens, trainable, logp, zeros, zeros, 1.0, 1.0, "stop", routing, outcome=1.0)


def unrouted(*lengths: int) -> tuple[Sample, ...]:
    return tuple(sample(length, routed=False) for length in lengths)


def test_layout_by_hand():
    batch = pack([Group(7, (sample(4, prompt=2), sample(3, prompt=1)))])
    assert batch.input_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.target_ids.tolist() == [1, 2, 3, 1, 2]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.segment.tolist() == [0, 0, 0, 1, 1]
    assert batch.trainable.tolist() == [False, True, True, True, True]
    assert batch.logp_rollout.tolist() == [0.0, -0.5, -0.5, -0.5, -0.5]
    assert batch.group.tolist() == [0, 0]
    assert len(batch.routing) == 5


@pytest.mark.parametrize("value", [2.0, torch.nan, -torch.inf])
def test_a_sample_refuses_a_value_that_is_no_log_probability(value):
    sound = sample(4)
    logp = sound.logp_rollout.index_fill(0, torch.tensor([2]), value)
    with pytest.raises(ValueError, match="no log-probability on a trainable slot"):
        dataclasses.replace(sound, logp_rollout=logp)
    elsewhere = sound.logp_rollout.index_fill(0, torch.tensor([0]), value)
    dataclasses.replace(sound, logp_rollout=elsewhere)  # a prompt's slot may hold anything


def test_top_logprobs_follow_their_slots():
    """They are 0 where not trainable, and chosen samples keep theirs."""

    def with_top(each, k=2):
        slots = len(each.trainable)
        falling = -torch.arange(float(slots * k)).view(slots, k)
        logp = torch.where(each.trainable[:, None], falling, torch.nan)
        ids = torch.full((slots, k), slots).int()
        return dataclasses.replace(each, top_ids=ids, top_logp_rollout=logp)

    long, short = with_top(sample(4, prompt=2)), with_top(sample(3, prompt=1))
    batch = pack([Group(7, (long, short))])
    assert batch.top_logp_rollout.tolist() == [[0, 0], [-2, -3], [-4, -5], [0, -1], [-2, -3]]
    assert batch.top_ids.tolist() == [[3, 3]] * 3 + [[2, 2]] * 2
    chosen = batch.select([1]).to("cpu")
    assert chosen.top_logp_rollout.tolist() == [[0, -1], [-2, -3]]
    assert chosen.top_ids.tolist() == [[2, 2]] * 2
    for other in (with_top(sample(3), k=3), sample(3)):
        with pytest.raises(UsageError, match="different numbers of top log-probabilities"):
            pack([Group(0, (long, other))])


def test_routes_all_or_none():
    with pytest.raises(UsageError, match="1 of 2 parts have no RoutingTrace"):
        pack([Group(0, (sample(4), *unrouted(4)))])
    assert pack([Group(0, unrouted(4))]).routing is None
    with pytest.raises(UsageError, match="no samples"):
        pack([])


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_micro_batches_partition_and_respect_the_budget(lengths, budget):
    batch = pack([Group(0, unrouted(*lengths))])
    chosen = micro_batches(batch, budget)
    assert sorted(s for part in chosen for s in part) == list(range(len(lengths)))
    for part in chosen:
        assert sum(lengths[s] - 1 for s in part) <= budget or len(part) == 1


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_minibatches_keep_groups_whole(parts, groups_per_part, size):
    groups = [Group(g, unrouted(*[3] * size)) for g in range(parts * groups_per_part)]
    chosen = minibatches(pack(groups), parts)
    assert [s for part in chosen for s in part] == list(range(len(groups) * size))
    assert all(len(part) == groups_per_part * size for part in chosen)


def test_a_remainder_is_spread_over_the_minibatches():
    groups = [Group(g, unrouted(3)) for g in range(31)]
    chosen = minibatches(pack(groups), 16)
    assert [len(part) for part in chosen] == [1, *[2] * 15]
    assert [s for part in chosen for s in part] == list(range(31))


def test_fewer_groups_than_minibatches_take_fewer():
    groups = [Group(g, unrouted(3)) for g in range(2)]
    assert minibatches(pack(groups), 3) == [[0], [1]]
