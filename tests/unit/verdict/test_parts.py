"""Rules about parts of the slots, on hand-made log-probabilities near each rule's border."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from onepolicy.verdict.local_faults import copies, odd_rows, split, unlike_parts
from onepolicy.verdict.scale_faults import multiplied
from onepolicy.verdict.scored_tokens import Pairs

STRETCHES = "stretches of rows are of two kinds, near and far"


def pairs_of(old: Tensor, rollout: Tensor) -> Pairs:
    """Return the pairs of log-probabilities [R, T], a row a sequence."""
    segment = torch.arange(len(old))[:, None].expand(old.shape).flatten()
    slot = torch.arange(old.numel())
    return Pairs(old.double().flatten(), rollout.double().flatten(), segment, slot, *[None] * 3)


def from_logits(middle: Tensor, gap: Tensor) -> Pairs:
    """Return pairs whose logits are `gap` apart around `middle`, both [R, T] float64."""
    return pairs_of(logsigmoid(middle - gap / 2), logsigmoid(middle + gap / 2))


@pytest.mark.parametrize(
    ("rows", "apart", "border"),
    [
        # Chance alone spreads 12 means of 6 ranks by up to 1 + 5 (2 / 12)^0.5 = 3.04 times what
        # they should be. Two kinds 0.3 apart are spread 1.8 times, 0.5 apart 4.9 times.
        (12, 0.3, None),
        (12, 0.5, 0.5),
        # With 48 rows the bound is 2.02, and 0.3 apart is 1.7 times, 0.4 apart 2.9 times.
        (48, 0.3, None),
        (48, 0.4, 0.5),
    ],
)
def test_two_kinds_of_mean_ranks_are_farther_apart_than_chance(rows, apart, border) -> None:
    kinds = torch.arange(rows) % 2 - 0.5
    means = (0.5 + apart * kinds).double()
    assert split(means, torch.full((rows,), 6.0).double()) == border


def stretches(apart: float) -> list[str]:
    """Return the marks of 24 rows of 16 slots, every second with ranks that are `apart` larger."""
    g = torch.Generator().manual_seed(0)
    far = (torch.arange(24) % 2)[:, None].double()
    rank = (torch.arange(16)[None].double() + 0.5) / 16 * (1 - apart) + apart * far
    middle = 2 * torch.randn(24, 16, generator=g, dtype=torch.float64)
    return unlike_parts(from_logits(middle, 0.2 + rank))


def test_stretches_are_judged_by_the_slots_that_they_have() -> None:
    assert STRETCHES not in stretches(0.2)  # 16 ranks may be that far from 24 others by chance
    assert STRETCHES in stretches(0.4)


def test_a_row_with_more_noise_is_not_of_the_far_kind() -> None:
    """Its ranks are nearer to those of the far rows, its distances to those of the near ones."""
    g = torch.Generator().manual_seed(0)
    size = torch.full((32, 1), 0.05).double()
    size[::4] *= 7
    size[1] *= 2.3
    noise = 1 + 0.5 * torch.rand(32, 40, generator=g, dtype=torch.float64)
    found = odd_rows(from_logits(torch.randn(32, 40, generator=g).double(), size * noise))
    assert found is not None
    assert found.cause == "stale"
    assert "about 8 of 32 rows" in found.evidence


def partly_equal(rows: int, tokens: int, equal: int, share: float) -> Pairs:
    """Return rows of which the first `equal` agree everywhere, the others at `share` of tokens."""
    old = torch.full((rows, tokens), -1.0).double()
    differs = torch.arange(rows * tokens).view(rows, tokens) % round(1 / share) != 0
    differs[:equal] = False
    return pairs_of(old, old - 0.1 * differs)


@pytest.mark.parametrize(
    ("rows", "tokens", "equal", "share", "copied"),
    [
        # Of 1,000 rows of 6 tokens that agree at a quarter, 0.24 agree everywhere by chance.
        (1000, 6, 2, 0.25, False),
        (1000, 6, 6, 0.25, True),  # exp(6 - 0.24) (0.24 / 6)^6 = 1.4e-6
        (1000, 24, 2, 0.25, True),
        (4000, 6, 3000, 0.25, True),
    ],
)
def test_rows_that_agree_by_chance_are_no_copies(rows, tokens, equal, share, copied) -> None:
    assert (copies(partly_equal(rows, tokens, equal, share)) is not None) is copied


def test_tokens_that_siblings_share_are_no_evidence_of_a_copy() -> None:
    """Two rows agree at six tokens, of which they share five."""
    pairs = partly_equal(24, 6, 2, 0.25)
    assert copies(pairs) is not None
    context = torch.arange(24 * 6).view(24, 6)
    context[1, :5] = context[0, :5]
    assert copies(replace(pairs, context=context.flatten())) is None


def factors(*groups: tuple[int, float, float, float]) -> Pairs:
    """Return tokens in groups of (how many, lowest and highest log-probability, factor)."""
    old = torch.cat([torch.linspace(low, high, n).double() for n, low, high, _ in groups])
    by = torch.cat([torch.full((n,), factor).double() for n, _, _, factor in groups])
    return pairs_of(old[None], (old / by)[None])


LIKELY, UNLIKELY, CERTAIN = (20, -0.4, -0.1), (20, -1.9, -1.2), (20, -0.004, -0.002)


def test_certain_tokens_may_hide_the_factor_of_the_others() -> None:
    """The certain ones are equal on both sides, as rounding of small numbers makes them."""
    found = multiplied(factors((*LIKELY, 3.0), (*UNLIKELY, 3.0), (*CERTAIN, 1.0)))
    assert found is not None
    assert found.cause == "scale"
    assert found.sure
    assert "3 times the rollout's, those of likely and of unlikely tokens" in found.evidence


@pytest.mark.parametrize(("rare", "named"), [(3.0, True), (3.6, True), (5.0, False)])
def test_rare_tokens_with_another_factor_are_no_scale(rare, named) -> None:
    """The logarithms of the factors may differ by a quarter: 3^1.25 = 3.9."""
    groups = (*LIKELY, 3.0), (*UNLIKELY, 3.0), (20, -8.0, -3.0, rare), (*CERTAIN, 1.0)
    assert (multiplied(factors(*groups)) is not None) == named


@pytest.mark.parametrize(("uncertain", "named"), [(7, False), (8, True)])
def test_certain_tokens_alone_show_no_factor(uncertain, named) -> None:
    groups = (40, -0.004, -0.002, 3.0), (40, -9e-4, -2e-4, 3.0), (uncertain, -2.0, -1.0, 3.0)
    found = multiplied(factors(*groups))
    assert (found is not None) == named
    if found is not None:
        assert f"{math.e ** math.log(3):.0f} times the rollout's, whatever" in found.evidence


def test_tokens_that_one_side_rounds_to_certain_do_not_hide_rows_that_do_not_follow() -> None:
    """Four tokens in five of the near rows are -2e-5 nats on one side and 0 on the other."""
    g = torch.Generator().manual_seed(0)
    middle, other, noise = torch.randn(3, 24, 64, generator=g, dtype=torch.float64)
    certain, side = torch.rand(2, 24, 64, generator=g) < torch.tensor([0.8, 0.5])[:, None, None]
    certain[:8] = False
    old = logsigmoid(2 * middle).masked_fill(certain, 0.0).masked_fill(certain & side, -2e-5)
    rollout = logsigmoid(2 * middle + noise / 20)
    rollout = rollout.masked_fill(certain, 0.0).masked_fill(certain & ~side, -2e-5)
    rollout[:8] = logsigmoid(2 * other[:8])
    found = odd_rows(pairs_of(old, rollout))
    assert found is not None
    assert found.cause == "rows"
