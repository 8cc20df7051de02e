"""Sampling by hand: the token that a uniform picks, and its log-probability."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.config import UsageError
from onepolicy.rollout.hf.sampler import (
    BatchSampling,
    check_sampling,
    sample_tokens,
    uniform_numbers,
)
from onepolicy.types import Sampling

CPU = torch.device("cpu")
P = torch.tensor([0.1, 0.4, 0.2, 0.3])  # cdf 0.1 0.5 0.7 1.0


def draw(probability, uniform, *rows):
    logits = probability.log().expand(len(rows), -1) + 3.0  # a constant changes nothing
    uniform, rows = (
        torch.as_tensor(uniform, dtype=torch.float64),
        BatchSampling.from_requests(rows, CPU),
    )
    return sample_tokens(logits, uniform, rows)[:2]


def test_inverse_cdf():
    us = [0.0, 0.05, 0.15, 0.49, 0.51, 0.69, 0.71, 0.999999]
    tokens, logp = draw(P, us, *[Sampling(1.0, 1)] * 8)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(logp, P[tokens].log())
    assert logp.dtype == torch.float32


def test_zero_probability_is_never_sampled():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    tokens, logp = draw(p, [0.0, 0.4999, 0.5001, 1 - 2**-53], *[Sampling(1.0, 1)] * 4)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert torch.isfinite(logp).all()


def test_temperature():
    tempered = P**2 / (P**2).sum()  # temperature 0.5
    tokens, logp = draw(P, [0.0, 0.99], *[Sampling(0.5, 1)] * 2)
    assert tokens.tolist() == [0, 3]
    torch.testing.assert_close(logp, tempered[tokens].log())


def test_greedy_has_the_untempered_logp_and_ignores_narrowing():
    tokens, logp = draw(P, [0.99], Sampling(0.0, 1, top_k=1, top_p=0.1))
    assert tokens.tolist() == [1]
    assert logp.item() == pytest.approx(math.log(0.4))


@pytest.mark.parametrize(
    "narrowed",
    [
        {"top_k": 2},
        {"top_p": 0.6},  # 0.4, then 0.3 crosses 0.6
        {"top_k": 3, "top_p": 0.7},  # top_p after top_k: 4/9 + 3/9 >= 0.7, so the third is out
    ],
)
def test_top_k_and_top_p_renormalise(narrowed):
    tokens, logp = draw(P, [0.0, 0.56, 0.58, 0.99], *[Sampling(1.0, 1, **narrowed)] * 4)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert logp.exp().tolist() == pytest.approx([4 / 7, 4 / 7, 3 / 7, 3 / 7])


def test_a_top_p_below_float32_keeps_the_likeliest_token():
    tokens, logp = draw(P, [0.99], Sampling(1.0, 1, top_p=1e-46))
    assert (tokens.tolist(), logp.tolist()) == ([1], [0.0])


def test_rows_do_not_touch_each_other():
    rows = [Sampling(1.0, 1), Sampling(0.5, 1, top_k=2), Sampling(0.0, 1)]
    rows.append(Sampling(2.0, 1, top_p=0.5))
    together = draw(P, [0.3, 0.6, 0.9, 0.2], *rows)
    for i, (row, u) in enumerate(zip(rows, [0.3, 0.6, 0.9, 0.2], strict=True)):
        alone = draw(P, [u], row)
        assert together[0][i] == alone[0][0]
        torch.testing.assert_close(together[1][i], alone[1][0])


def test_frequencies():
    tokens, _ = draw(P, uniform_numbers(0, 20_000), *[Sampling(1.0, 1)] * 20_000)
    observed = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(observed, P, atol=0.015, rtol=0)


def test_unneeded_parameters_cost_nothing():
    rows = BatchSampling.from_requests([Sampling(1.0, 1)] * 2, CPU)
    unused = rows.temperature, rows.greedy, rows.top_k, rows.top_p, rows.min_p, rows.support
    assert unused == (None,) * 6
    assert sample_tokens(P[None].log(), torch.zeros(1).double(), rows)[2:] == (None, None, ())


def test_supports_of_the_rows_that_ask():
    """By hand, P = 0.1, 0.4, 0.2, 0.3: min-p keeps what has 0.16, before top-p."""
    kinds = [{"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4}, {"min_p": 0.4, "top_p": 0.7}, {}]
    asked = [Sampling(1.0, 1, support=True, **kind) for kind in kinds]
    rows = BatchSampling.from_requests([*asked, Sampling(1.0, 1, top_k=1)], CPU)
    new = sample_tokens(P.log().expand(6, -1), torch.zeros(6).double(), rows)
    sets = [kept.ids.tolist() for kept in new.support]
    assert sets == [[1, 3], [1, 2, 3], [1, 2, 3], [1, 3], [0, 1, 2, 3], []]
    assert all(kept.logp is None for kept in new.support)
    assert new.logp[3].exp() == pytest.approx(4 / 7 if new.tokens[3] == 1 else 3 / 7)


def test_a_support_with_its_values():
    """By hand: 0.4 and 0.3 of P after top_k = 2."""
    asked = Sampling(1.0, 1, top_k=2, support=True, support_logp=True)
    rows = BatchSampling.from_requests([asked], CPU)
    (kept,) = sample_tokens(P.log()[None], torch.zeros(1).double(), rows).support
    assert kept.ids.tolist() == [1, 3]
    assert np.exp(kept.logp).tolist() == pytest.approx([4 / 7, 3 / 7])


def test_top_logprobs_are_of_the_distribution_sampled_from():
    """By hand: all of P; P squared (temperature 0.5); the rest after top_k = 2, with -inf for the
    third."""
    asked = [Sampling(1.0, 1, top_logprobs=3), Sampling(0.5, 1, top_logprobs=1)]
    rows = BatchSampling.from_requests([*asked, Sampling(1.0, 1, top_k=2)], CPU)
    new = sample_tokens(P.log().expand(3, -1), torch.zeros(3).double(), rows)
    assert new.top_ids[:2].tolist() == [[1, 3, 2]] * 2
    assert new.top_ids[2, :2].tolist() == [1, 3]
    expected = [[0.4, 0.3, 0.2], [16 / 30, 9 / 30, 4 / 30], [4 / 7, 3 / 7, 0.0]]
    torch.testing.assert_close(new.top_logp.exp(), torch.tensor(expected))
    assert new.top_logp[2, 2] == -math.inf


@given(st.integers(0, 2**56 - 1), st.integers(1, 50))
def test_uniforms_are_a_function_of_the_seed(seed, count):
    first = uniform_numbers(seed, count)
    assert (first == uniform_numbers(seed, count)).all()
    # a longer limit draws the same beginning
    assert (first == uniform_numbers(seed, count + 7)[:count]).all()
    assert (first != uniform_numbers(seed + 1, count)).any()
    assert ((first >= 0) & (first < 1)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -0.1), ("temperature", math.inf), ("max_tokens", 0), ("top_p", 1.1)),
        *(("top_k", -1), ("top_k", 2**63), ("top_logprobs", -1)),
        *(("temperature", 1e-40), ("stop", (2**70,))),
    ],
)
def test_bad_parameters(name, value):
    with pytest.raises(UsageError, match=name):
        check_sampling(Sampling(**({"temperature": 1.0, "max_tokens": 5} | {name: value})))
