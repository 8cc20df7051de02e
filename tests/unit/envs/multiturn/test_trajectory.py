import dataclasses

import pytest
import torch

from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.types import Completion, RouteSpan, RoutingTrace

VERSION, LOGP = torch.tensor([4, 5], dtype=torch.int32), torch.tensor([-0.5, -0.25])


def sampled(prompt_ids, routing=None, first_slot=0, reward=0.0, temperature=1.0, **top):
    """Return the sample of a prompt and its response 7 8."""
    path, ids = Trajectory(prompt_ids), torch.tensor([7, 8], dtype=torch.int32)
    path.append_completion(Completion(ids, LOGP, VERSION, "stop", routing, first_slot, **top))
    return path.to_sample(reward=reward, temperature=temperature)


def trace(rows, spans=()):
    ids = torch.arange(rows * 2 * 2, dtype=torch.uint8).reshape(rows, 2, 2)
    return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), (0, 1), 64, spans)


def test_slots_by_hand():
    """Prompt 1 2 3, response 7 8: slots feed 1 2 3 7 and predict 2 3 7 8. The last two are the
    policy's."""
    sample = sampled([1, 2, 3], reward=0.5, temperature=0.7)
    assert sample.tokens.tolist() == [1, 2, 3, 7, 8]
    assert sample.trainable.tolist() == [False, False, True, True]
    assert sample.logp_rollout[:2].isnan().all()
    assert sample.logp_rollout[2:].tolist() == [-0.5, -0.25]
    assert sample.version.tolist() == [-1, -1, 4, 5]
    assert sample.turn.tolist() == [-1, -1, 0, 0]
    assert (sample.reward, sample.temperature, sample.finish) == (0.5, 0.7, "stop")
    assert (sample.routing, sample.outcome, sample.response_length) == (None, None, 2)
    whole = (sample.tokens, sample.version, sample.turn)
    assert {each.dtype for each in whole} == {torch.int32}
    assert sample.logp_rollout.dtype == torch.float32
    short = sampled([9])  # a prompt of one token has no untrained slot
    assert short.trainable.tolist() == [True, True]
    assert short.logp_rollout.tolist() == [-0.5, -0.25]


def test_top_logprobs_have_the_shape_of_the_slots():
    top_ids, top_logp = torch.tensor([[7, 3], [8, 1]], dtype=torch.int32), torch.zeros(2, 2)
    sample = sampled([1, 2, 3], top_ids=top_ids, top_logp=top_logp)
    assert sample.top_ids.dtype == torch.int32
    with pytest.raises(ValueError, match=r"top_ids \(1, 2\) and top_logp_rollout \(4, 2\)"):
        dataclasses.replace(sample, top_ids=top_ids[:1])
    with pytest.raises(ValueError, match="top_logp_rollout is missing"):
        dataclasses.replace(sample, top_logp_rollout=torch.full((4, 2), float("nan")))


def test_missing_first_rows_are_marked_missing():
    rows = trace(3, (RouteSpan(0, 3, "decode", 4),))
    routing = sampled([1, 2, 3], rows, first_slot=1).routing
    assert routing.valid.tolist() == [False, True, True, True]
    assert torch.equal(routing.ids[1:], rows.ids)
    assert routing.ids.dtype == torch.uint8
    assert routing.spans == (RouteSpan(1, 3, "decode", 4),)


def test_what_cannot_be_a_path_is_refused():
    for rows, first in ((3, 0), (5, 0), (4, 1)):
        message = f"{rows} routing rows from slot {first} on for a path of 4 slots"
        with pytest.raises(ValueError, match=message):
            sampled([1, 2, 3], trace(rows), first)
    with pytest.raises(AssertionError, match="prompt token"):
        sampled([])
