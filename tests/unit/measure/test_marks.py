"""Which marks of a gap a verdict gets when replay takes the gap off, or does not."""

import pytest
import torch

from onepolicy.measure.measure import _diagnosis
from onepolicy.measure.result import ScoredRollouts
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.row_faults import MarkOfRows
from support.objective_batches import batch

PLACE, ROWS = "the gap jumps at token 9", MarkOfRows("2 rows hold most of k3")


def scored(off: float):
    """Return 64 tokens whose trainer is `off` nats away, up and down in turn."""
    rollout = torch.full((64,), -1.0)
    old = rollout + off * torch.tensor([1.0, -1.0]).repeat(32)
    trainable = torch.ones(64, dtype=torch.bool)
    return batch([32, 32], trainable, [0.0, 1.0], logp_rollout=rollout, logp_old=old)


@pytest.mark.parametrize(
    ("replayed", "marks", "kept"),
    [
        (0.01, (PLACE, ROWS), (PLACE,)),  # replay helps: rows are those of other routes
        (0.5, (PLACE, ROWS), (PLACE, ROWS)),
        (None, (PLACE, ROWS), (PLACE, ROWS)),
    ],
)
def test_marks_of_places_stay_and_those_of_rows_go_where_replay_helps(replayed, marks, kept):
    under = None if replayed is None else scored(replayed)
    first = ScoredRollouts((), scored(0.5), under, "", None, Diagnosis(0.5, (), marks))
    assert _diagnosis(first, ()).marks == kept
