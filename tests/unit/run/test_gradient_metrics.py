"""The part of the gradient that tokens hold which the trainer finds less than half as likely."""

import math

import pytest
import torch

from onepolicy.run.metric_names import is_known
from onepolicy.run.step_metrics import gradient_metrics
from support.objective_batches import batch

NAME = "train/halved_gradient"


def trained(**changes):
    """Return a batch of 5 slots; the first is a prompt's, the last is rejected."""
    made = batch([5], torch.tensor([False, True, True, True, True]), [0.0])
    p_trainer = torch.tensor([0.01, 0.2, 0.5, 0.75, 0.1])
    p_rollout = torch.tensor([0.90, 0.5, 0.9, 0.50, 0.9])
    fields = {
        "logp_old": p_trainer.log(),
        "logp_rollout": p_rollout.log(),
        "advantage": torch.tensor([9.0, -1.0, 2.0, -0.5, 9.0]),
        "weight": torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0]),
        "keep": torch.tensor([False, True, True, True, False]),
    }
    return made.replace(**fields | changes)


def test_by_hand():
    """|A| (1 - p) w is 0.4, 1.0 and 0.25. Only the first token is less than half as likely."""
    found = gradient_metrics(trained())
    assert found == {NAME: pytest.approx(0.4 / 1.65)}
    assert is_known(NAME)


def test_without_a_correction_every_trainable_token_counts():
    """|A| (1 - p): 0.8, 1.0, 0.125 and 8.1. The first and the last are halved."""
    found = gradient_metrics(trained(weight=None, keep=None))
    assert found == {NAME: pytest.approx((0.8 + 8.1) / (0.8 + 1.0 + 0.125 + 8.1))}


def test_exactly_half_is_not_below_it():
    half = torch.full((5,), math.log(0.5))
    assert gradient_metrics(trained(logp_old=half, logp_rollout=torch.zeros(5)))[NAME] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"logp_old": None},
        {"advantage": None},
        {"advantage": torch.zeros(5)},
        {"advantage": torch.full((5,), math.nan)},
        {"keep": torch.zeros(5, dtype=torch.bool)},
    ],
)
def test_no_gradient_has_no_such_measure(changes):
    assert gradient_metrics(trained(**changes)) == {}


def test_a_rejected_token_may_be_nan():
    logp = trained().logp_old.clone()
    logp[[0, 4]] = math.nan
    assert gradient_metrics(trained(logp_old=logp)) == {NAME: pytest.approx(0.4 / 1.65)}
