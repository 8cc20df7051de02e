"""Sampling from a large vocabulary by blocks: the tokens of a float64 running sum."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.rollout.hf.large_vocabulary import BLOCK, invert_cdf
from onepolicy.rollout.hf.sampler import BatchSampling, sample_tokens
from onepolicy.types import Sampling

LAST = 1 - 2**-53  # the largest uniform number


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("size", [8192, 20_000, 151_936])
@pytest.mark.parametrize("spread", [0.0, 2.0, 8.0])
def test_a_token_holds_its_uniform_number(size, spread):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(16, size, generator=generator) * spread
    probability = torch.softmax(logits, -1)
    uniform = torch.rand(16, generator=generator, dtype=torch.float64)
    tokens = invert_cdf(probability, uniform)[:, 0]
    exact = probability.double().numpy()
    ends = np.cumsum(exact, -1)
    for row, token in enumerate(tokens.tolist()):
        end, total = ends[row, token], ends[row, -1]
        begin = end - exact[row, token]
        assert begin - 1e-6 <= uniform[row] * total <= end + 1e-6


@given(st.lists(st.integers(0, 20_000 - 1), min_size=1, max_size=4, unique=True), st.data())
def test_only_tokens_with_a_probability_are_sampled(tokens, data):
    tokens = sorted(tokens)
    probability = torch.zeros(1, 20_000)
    probability[0, tokens] = 1 / len(tokens)
    uniform = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, LAST]) | st.floats(0, LAST))
    expected = tokens[min(int(uniform * len(tokens)), len(tokens) - 1)]
    found = int(invert_cdf(probability, doubles(uniform)))
    assert found in tokens
    near_a_boundary = abs(uniform * len(tokens) - round(uniform * len(tokens))) < 1e-6
    assert found == expected or near_a_boundary


@pytest.mark.parametrize("token", [0, BLOCK - 1, BLOCK, 19_999])
def test_first_and_last_tokens_of_blocks(token):
    probability = torch.zeros(3, 20_000)
    probability[:, token] = 0.3  # a sum that is not 1
    assert invert_cdf(probability, doubles(0.0, 0.5, LAST))[:, 0].tolist() == [token] * 3


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 30_000, generator=generator)
    uniform = torch.rand(24, generator=generator, dtype=torch.float64)
    rows = [Sampling(1.0, 1)] * 24
    cpu = torch.device("cpu")
    together = sample_tokens(logits, uniform, BatchSampling.from_requests(rows, cpu))
    for row in range(24):
        alone = sample_tokens(
            logits[row : row + 1],
            uniform[row : row + 1],
            BatchSampling.from_requests(rows[:1], cpu),
        )
        assert alone.tokens == together.tokens[row]


def test_top_k_leaves_out_the_others():
    logits = torch.arange(10_000).float()[None] / 1000
    draws = torch.linspace(0, LAST, 50, dtype=torch.float64)
    rows = BatchSampling.from_requests([Sampling(1.0, 1, top_k=3)] * 50, torch.device("cpu"))
    tokens = sample_tokens(logits.expand(50, -1), draws, rows).tokens
    assert set(tokens.tolist()) == {9997, 9998, 9999}
