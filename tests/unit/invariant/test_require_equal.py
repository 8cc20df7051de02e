"""A step of an on-policy run in which any bit differs stops the run and is named."""

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.invariant.require_equal import differing_slots, require_equal
from onepolicy.types import RoutingTrace
from support.objective_batches import batch, group

OURS = '{"torch": "x"}'


def scored(**fields):
    """Return samples of 2, 3, 2 and 1 slots, two a group; slot 0 of the first three is prompt."""
    trainable = torch.tensor([False, True, False, True, True, False, True, True])
    made = batch([2, 3, 2, 1], trainable, [0.0] * 4)
    logp = -torch.arange(1.0, 9.0)
    fields |= {"logp_rollout": logp, "logp_old": logp.clone()}
    return made.replace(fingerprints=frozenset({OURS}), **fields)


def require(made):
    require_equal(made, [group([0.0, 1.0], 7), group([0.0, 1.0], 9)], OURS, when="step 3")


def routes(ids):
    valid = torch.ones(len(ids), dtype=torch.bool)
    return RoutingTrace(torch.tensor(ids, dtype=torch.uint8), valid, (1, 5), 8)


def test_equal_is_quiet_and_the_prompt_does_not_count():
    made = scored()
    made.logp_old[0] = 3.0
    require(made)
    require(made.replace(logp_old=None))  # nothing scored yet


def test_the_first_difference_is_named():
    made = scored()
    made.logp_old[6] = made.logp_old[6].nextafter(torch.tensor(0.0))
    made.logp_old[7] = -1.0
    assert differing_slots(made).nonzero().flatten().tolist() == [6, 7]
    with pytest.raises(TrainingError) as stopped:
        require(made)
    for part in (
        "step 3: 2 of 5 log-probabilities differ, first problem 9, sample 0 of its group, slot 1",
        "-7 in the engine, -6.99999952 in the trainer",
        "onepolicy measure --numerics on-policy",
    ):
        assert part in str(stopped.value)


def test_routes_count_too():
    same = [[[1, 2], [3, 4]]] * 8
    require(scored(routing=routes(same), routing_native=routes([[[2, 1], [3, 4]]] * 8)))  # a set
    other = [[[1, 2], [3, 4]]] * 7 + [[[1, 2], [3, 5]]]
    with pytest.raises(TrainingError, match=r"6.25% of the routes .* first in layer 5"):
        require(scored(routing=routes(same), routing_native=routes(other)))
