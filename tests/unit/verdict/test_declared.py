"""What a run declares says how large a gap may be before it is looked into."""

from __future__ import annotations

import pytest
import torch

from onepolicy.verdict.bug_signatures import diagnose
from onepolicy.verdict.declared import CEILINGS, TOO_FAR, Declared, declared_of


@pytest.mark.parametrize(
    ("settings", "number_format"),
    [
        ({}, "bfloat16"),
        ({"rollout": {"quant": None}, "train": None}, "bfloat16"),
        ({"rollout": {"quant": {"format": "fp8-weight"}}}, "fp8"),
        ({"rollout": {"quant": {"format": "int8"}}, "train": {"lora": {"base": "nf4"}}}, "4bit"),
        ({"rollout": {"quant": {"format": "simulated", "bits": 8}}}, "int8"),
        ({"rollout": {"quant": {"format": "simulated"}}}, "4bit"),
        ({"rollout": "damaged"}, "bfloat16"),
        ({"rollout": {"quant": {"format": ["int8"]}}, "train": {"lora": {"base": {}}}}, "bfloat16"),
        ({"rollout": {"quant": {"format": "simulated", "bits": "8"}}}, "4bit"),
    ],
)
def test_the_coarsest_format_of_the_settings_counts(settings, number_format) -> None:
    assert declared_of(settings) == Declared(number_format)


def test_a_gap_that_is_made_has_no_ceiling_and_age_raises_it() -> None:
    assert declared_of({"rollout": {"pressure": {"scale": 0.6}}}).ceiling == TOO_FAR
    assert Declared("fp8", age=2).ceiling == pytest.approx(CEILINGS["fp8"] + 0.2)
    assert Declared(age=64).ceiling == TOO_FAR


def siblings(distinct: int, *, tokens: bool) -> tuple[str, ...]:
    """Diagnose 16 groups of 8 siblings. In the first `distinct` groups the engine has one number in
    the place of its value at the third token. Return the causes."""
    g = torch.Generator().manual_seed(0)
    old = (-0.5 - 3 * torch.rand(16, 1, 40, generator=g)).expand(16, 8, 40).clone()
    rollout = old + 0.02 * torch.randn(16, 1, 40, generator=g)
    rollout[:distinct, :, 2] = -0.71
    ids = torch.randint(1000, (16, 1, 40), generator=g).expand(16, 8, 40)
    found = diagnose(
        old.reshape(128, 40),
        rollout.reshape(128, 40),
        torch.ones(128, 40, dtype=torch.bool),
        tokens=ids.reshape(128, 40) if tokens else None,
    )
    return tuple(each.cause for each in found.findings)


@pytest.mark.parametrize("tokens", [True, False])
def test_equal_values_of_siblings_are_one_observation(tokens) -> None:
    assert "fill" not in siblings(2, tokens=tokens)
    assert "fill" in siblings(8, tokens=tokens)


def test_a_division_by_a_number_of_each_token_or_row_is_named() -> None:
    g = torch.Generator().manual_seed(0)
    old = -0.3 - 3 * torch.rand(64, 40, generator=g)
    ids = torch.randint(20, (64, 40), generator=g)
    mask = torch.ones(64, 40, dtype=torch.bool)
    characters = 2.0 + torch.arange(20) % 7
    lengths = 2.0 + torch.arange(64)[:, None] % 7
    for divisor, words in ((characters[ids], "token of the vocabulary"), (lengths, "each row")):
        found = diagnose(old, old / divisor, mask, tokens=ids)
        assert [each.cause for each in found.findings] == ["scale"]
        assert words in found.text()
