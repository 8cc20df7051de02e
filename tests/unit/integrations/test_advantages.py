"""Weights on the advantages are weights on the loss."""

import math

import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.config.presets import correction_presets
from onepolicy.integrations.core.advantages import fixed_correction, weighted_advantages

ROLLOUT = torch.log(torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]))
OLD = torch.log(torch.tensor([[0.25, 0.5, 0.99], [0.9, 0.5, 0.1]]))
MASK = torch.tensor([[True, True, True], [True, True, False]])


def weighted(correction, old=OLD, rollout=ROLLOUT, mask=MASK):
    return weighted_advantages(torch.tensor([2.0, -1.0]), old, rollout, mask, correction)


def test_truncated_weights_by_hand():
    found = weighted(fixed_correction(op.preset("tis", weight={"high": 1.5})))
    # rho = 0.5, 1, 1.98 and 1.8, 1; bound 1.5; the last token is masked out
    expected = torch.tensor([[1.0, 2.0, 3.0], [-1.5, -1.0, 0.0]])
    torch.testing.assert_close(found.advantages, expected, rtol=1e-6, atol=1e-6)
    assert found.keep.equal(MASK)
    assert found.report["correction/slots"] == 5


def test_a_rejected_token_is_zero_and_the_others_stay_as_loud():
    found = weighted(fixed_correction(op.preset("icepop", weight={"high": 1.5})))
    assert found.advantages[0, 2] == found.advantages[1, 0] == 0
    torch.testing.assert_close(found.advantages[0, :2], torch.tensor([1.0, 2.0]))
    assert found.report["correction/denominator"] == 5


def test_a_log_probability_that_is_not_finite_is_rejected():
    rollout = ROLLOUT.clone()
    rollout[0, 1] = math.nan
    found = weighted(op.preset("tis", max_nonfinite=0.5), rollout=rollout)
    assert found.advantages.isfinite().all()
    assert found.advantages[0, 1] == 0


def test_a_step_without_tokens_has_no_weights():
    found = weighted(op.preset("tis"), mask=torch.zeros_like(MASK))
    assert not found.advantages.any()
    assert found.report == {}


def test_every_preset_is_taken_or_refused_by_name():
    taken = 0
    for name in correction_presets():
        if op.preset(name).live:
            with pytest.raises(UsageError, match=name):
                fixed_correction(name)
        else:
            taken += fixed_correction(name) == op.preset(name)
    assert taken >= 20
    with pytest.raises(UsageError, match="no correction is called 'tiss'"):
        fixed_correction("tiss")


def test_shapes_are_named():
    with pytest.raises(UsageError, match=r"advantages are \[2, 5\] and the mask \[2, 3\]"):
        weighted_advantages(torch.zeros(2, 5), OLD, ROLLOUT, MASK, op.preset("tis"))
