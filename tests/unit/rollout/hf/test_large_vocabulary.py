"""Sampling from a large vocabulary by blocks: the tokens of a float64 running sum."""

from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.rollout.hf.sampler import (
    BLOCK,
    BatchSampling,
    invert_cdf_by_blocks,
    sample_tokens,
)
from onepolicy.types import Sampling

LAST = 1 - 2**-53  # the largest uniform number


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_token_holds_its_uniform_number(subtests):
    for size, spread in product([8192, 20_000, 151_936], [0.0, 2.0, 8.0]):
        generator = torch.Generator().manual_seed(size)
        logits = torch.randn(16, size, generator=generator) * spread
        probability = torch.softmax(logits, -1)
        uniform = torch.rand(16, generator=generator, dtype=torch.float64)
        tokens = invert_cdf_by_blocks(probability, uniform)[:, 0].numpy()
        exact, rows = probability.double().numpy(), np.arange(16)
        ends = np.cumsum(exact, -1)
        end, wanted = ends[rows, tokens], uniform.numpy() * ends[:, -1]
        with subtests.test(size=size, spread=spread):
            assert (end - exact[rows, tokens] - 1e-6 <= wanted).all()
            assert (wanted <= end + 1e-6).all()


@given(st.lists(st.integers(0, 20_000 - 1), min_size=1, max_size=4, unique=True), st.data())
def test_only_tokens_with_a_probability_are_sampled(tokens, data):
    tokens = sorted(tokens)
    probability = torch.zeros(1, 20_000)
    probability[0, tokens] = 1 / len(tokens)
    uniform = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, LAST]) | st.floats(0, LAST))
    expected = tokens[min(int(uniform * len(tokens)), len(tokens) - 1)]
    found = int(invert_cdf_by_blocks(probability, doubles(uniform)))
    assert found in tokens
    near_a_boundary = abs(uniform * len(tokens) - round(uniform * len(tokens))) < 1e-6
    assert found == expected or near_a_boundary


def test_first_and_last_tokens_of_blocks():
    for token in (0, BLOCK - 1, BLOCK, 19_999):
        probability = torch.zeros(3, 20_000)
        probability[:, token] = 0.3  # a sum that is not 1
        assert (
            invert_cdf_by_blocks(probability, doubles(0.0, 0.5, LAST))[:, 0].tolist() == [token] * 3
        )


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(24, 30_000, generator=generator)
    uniform = torch.rand(24, generator=generator, dtype=torch.float64)

    def tokens_of(rows):
        asked = [Sampling(1.0, 1)] * len(logits[rows])
        sampling = BatchSampling.from_requests(asked, torch.device("cpu"))
        return sample_tokens(logits[rows], uniform[rows], sampling).tokens

    together = tokens_of(slice(24))
    for row in range(24):
        assert tokens_of(slice(row, row + 1)) == together[row]


def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary():
    """Its log-probability is NaN, which `check_sampled_tokens` names."""
    rows = BatchSampling.from_requests([Sampling(1.0, 1)] * 2, torch.device("cpu"))
    for size in (8191, 10_000, 8192):
        logits = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
        logits[1] = torch.nan
        found = sample_tokens(logits, doubles(0.5, 0.5), rows)
        assert found.tokens[1] == size - 1
        assert found.logp.isnan().tolist() == [False, True]


def test_top_k_leaves_out_the_others():
    logits = torch.arange(10_000).float()[None] / 1000
    draws = torch.linspace(0, LAST, 50, dtype=torch.float64)
    rows = BatchSampling.from_requests([Sampling(1.0, 1, top_k=3)] * 50, torch.device("cpu"))
    tokens = sample_tokens(logits.expand(50, -1), draws, rows).tokens
    assert set(tokens.tolist()) == {9997, 9998, 9999}
