"""Causal attention of packed samples, beside a plain computation in float64."""

import pytest
import torch

from onepolicy.models.packed_attention import QUERIES, causal_attention


@pytest.mark.parametrize("window", [None, 3, 300, 10_000])
@pytest.mark.parametrize("start", [0, 5, QUERIES + 44])
@pytest.mark.parametrize("queries", [1, QUERIES, QUERIES + 1, 3 * QUERIES - 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_queries_see_the_keys_up_to_their_own(queries, start, window, with_sinks) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    keys = start + queries + 3  # the last are padding
    given = [normal(2, 4, queries, 8), normal(2, 2, keys, 8), normal(2, 2, keys, 8)]
    sinks = normal(4) if with_sinks else None
    if not start and not with_sinks:
        given[1:] = (x.detach()[:, :, :queries].requires_grad_() for x in given[1:])
    out = causal_attention(*given, scaling=0.5, window=window, sinks=sinks, start=start)
    exact = [x.detach().double().requires_grad_() for x in given]
    expected = plain(*exact, window, sinks, start)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    for found, right in zip(
        torch.autograd.grad(out.sum(), given),
        torch.autograd.grad(expected.sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=5e-5)


def plain(q, k, v, window, sinks, start):
    """Return softmax(q k / 2) v over the keys that each query sees, beside the head's sink."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    query, key = torch.arange(q.shape[2])[:, None] + start, torch.arange(k.shape[2])
    seen = (key <= query) & (key > query - (window or k.shape[2]))
    scores = (q @ k.transpose(2, 3) / 2).masked_fill(~seen, -torch.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.detach().double().exp().view(4, 1, 1)
    return weights / total @ v
