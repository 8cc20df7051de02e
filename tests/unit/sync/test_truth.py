"""Which adapter an engine samples with, from what its log-probabilities have moved by."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.sync.truth import find_fault, root_mean_square, share

ALL = torch.ones(2, 2, dtype=torch.bool)


def test_a_hand_computed_share():
    """E = (1, 2 | 0, 1), L(now) = (2, 2 | 0, 2), L(other) = 0: 6 + 2 of 8 + 4. Without the first
    prompt 2/4, without the second 6/8; their spread around 5/8 is 1/8."""
    moved, now = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[2.0, 2.0], [0.0, 2.0]])
    found = share(moved, now, torch.zeros(2, 2), ALL)
    assert found.value == pytest.approx(8 / 12)
    assert found.error == pytest.approx(math.sqrt(1 / 2 * 2 * (1 / 8) ** 2))
    assert found.certain


def test_masked_tokens_do_not_count():
    moved, now = torch.tensor([[1.0, 9e9], [1.0, 1.0]]), torch.ones(2, 2)
    mask = torch.tensor([[True, False], [True, True]])
    assert share(moved, now, torch.zeros(2, 2), mask) == (1.0, 0.0)
    assert root_mean_square(moved, mask) == 1.0


def test_without_an_effect_nothing_is_certain():
    found = share(torch.randn(4, 3), torch.zeros(4, 3), torch.zeros(4, 3), torch.ones(4, 3).bool())
    assert found.error == math.inf
    assert not found.certain


def hypotheses(prompts=32, tokens=16, size=1e-2):
    before = size * torch.randn(prompts, tokens)
    now = before + size * torch.randn(prompts, tokens)
    others = {"base": torch.zeros_like(now), "stale": before, "on_top": before + now}
    others["twice"] = 2 * now
    return now, others, torch.ones_like(now).bool()


def test_the_true_weights_are_named(subtests):
    for noise, truth in product([0.0, 1e-3, 1e-2], [None, "base", "stale", "on_top", "twice"]):
        torch.manual_seed(1)
        now, others, mask = hypotheses()
        moved = others.get(truth, now) + noise * torch.randn(now.shape)
        with subtests.test(noise=noise, truth=truth):
            assert find_fault(moved, now, others, mask) == truth


def test_an_effect_far_below_the_noise_names_nothing():
    torch.manual_seed(1)
    now, others, mask = hypotheses(size=1e-4)
    assert find_fault(0.1 * torch.randn(now.shape), now, others, mask) is None


@given(st.floats(-2, 3), st.integers(0, 2**31))
def test_the_share_of_a_mixture_is_its_weight(weight, seed):
    torch.manual_seed(seed)
    now, other = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    mixed = other + weight * (now - other)
    found = share(mixed, now, other, torch.ones(8, 4).bool())
    assert found.value == pytest.approx(weight, abs=1e-9)
    assert found.error < 1e-6
