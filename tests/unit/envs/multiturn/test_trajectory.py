import dataclasses
import math

import pytest
import torch

from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.types import Completion, RouteSpan, RoutingTrace


def sample_from_completion(prompt_ids, completion, reward, temperature):
    path = Trajectory(prompt_ids)
    path.append_completion(completion)
    return path.to_sample(reward=reward, temperature=temperature)


def trace(rows, spans=()):
    ids = torch.arange(rows * 2 * 2, dtype=torch.uint8).reshape(rows, 2, 2)
    return RoutingTrace(ids, torch.ones(rows, dtype=torch.bool), (0, 1), 64, spans)


def completion(routing=None, first_slot=0, **top):
    return Completion(
        token_ids=torch.tensor([7, 8], dtype=torch.int32),
        logp=torch.tensor([-0.5, -0.25]),
        version=torch.tensor([4, 5], dtype=torch.int32),
        finish="stop",
        routing=routing,
        first_slot=first_slot,
        **top,
    )


def test_slots_by_hand():
    """Prompt 1 2 3, response 7 8: slots feed 1 2 3 7 and predict 2 3 7 8. The last two are the
    policy's."""
    sample = sample_from_completion([1, 2, 3], completion(), 0.5, 0.7)
    assert sample.tokens.tolist() == [1, 2, 3, 7, 8]
    assert sample.trainable.tolist() == [False, False, True, True]
    assert all(math.isnan(x) for x in sample.logp_rollout[:2].tolist())
    assert sample.logp_rollout[2:].tolist() == [-0.5, -0.25]
    assert sample.version.tolist() == [-1, -1, 4, 5]
    assert sample.turn.tolist() == [-1, -1, 0, 0]
    assert (sample.reward, sample.temperature, sample.finish) == (0.5, 0.7, "stop")
    assert sample.routing is None
    assert sample.outcome is None
    assert sample.response_length == 2
    dtypes = [
        sample.tokens.dtype,
        sample.logp_rollout.dtype,
        sample.version.dtype,
        sample.turn.dtype,
    ]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]


def test_top_logprobs_are_on_the_slots_of_the_response():
    top_ids, top_logp = (
        torch.tensor([[7, 3], [8, 1]], dtype=torch.int32),
        torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]),
    )
    sample = sample_from_completion(
        [1, 2, 3], completion(top_ids=top_ids, top_logp=top_logp), 0.0, 1.0
    )
    assert sample.top_ids.tolist() == [[0, 0], [0, 0], [7, 3], [8, 1]]
    assert sample.top_ids.dtype == torch.int32
    assert torch.equal(sample.top_logp_rollout[2:], top_logp)
    assert sample.top_logp_rollout[:2].isnan().all()
    with pytest.raises(ValueError, match=r"top_ids \(1, 2\) and top_logp_rollout \(4, 2\)"):
        dataclasses.replace(sample, top_ids=top_ids[:1])
    with pytest.raises(ValueError, match="top_logp_rollout is missing"):
        dataclasses.replace(sample, top_logp_rollout=torch.full((4, 2), float("nan")))


def test_prompt_of_one_token_has_no_untrained_slot():
    sample = sample_from_completion([9], completion(), 0.0, 1.0)
    assert sample.trainable.tolist() == [True, True]
    assert sample.logp_rollout.tolist() == [-0.5, -0.25]


def test_full_routing_is_kept_as_it_is():
    rows = trace(4, (RouteSpan(0, 2, "prefill", 4), RouteSpan(2, 2, "decode", 5)))
    sample = sample_from_completion([1, 2, 3], completion(rows), 0.0, 1.0)
    assert torch.equal(sample.routing.ids, rows.ids)
    assert sample.routing.valid.all()
    assert sample.routing.spans == rows.spans


def test_missing_first_rows_are_marked_missing():
    rows = trace(3, (RouteSpan(0, 3, "decode", 4),))
    sample = sample_from_completion([1, 2, 3], completion(rows, first_slot=1), 0.0, 1.0)
    assert sample.routing.valid.tolist() == [False, True, True, True]
    assert torch.equal(sample.routing.ids[1:], rows.ids)
    assert sample.routing.ids.dtype == torch.uint8
    assert sample.routing.spans == (RouteSpan(1, 3, "decode", 4),)


@pytest.mark.parametrize(("rows", "first"), [(3, 0), (5, 0), (4, 1)])
def test_wrong_number_of_rows_is_refused(rows, first):
    with pytest.raises(
        ValueError, match=f"{rows} routing rows from slot {first} on for a path of 4 slots"
    ):
        sample_from_completion([1, 2, 3], completion(trace(rows), first), 0.0, 1.0)


def test_empty_prompt_is_refused():
    with pytest.raises(AssertionError, match="prompt token"):
        sample_from_completion([], completion(), 0.0, 1.0)
