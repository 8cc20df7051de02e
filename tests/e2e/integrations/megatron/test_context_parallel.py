"""The rows of a rank of context parallelism are those that Megatron's own function gives it."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core import utils

from onepolicy.integrations.core.layout import zigzag_rows

pytestmark = pytest.mark.megatron

SAMPLES, LENGTH = 3, 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_rows_are_megatrons(monkeypatch, ranks):
    positions = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    slices = utils.get_batch_on_this_cp_rank
    options = {}
    if "is_hybrid_cp" in inspect.signature(slices).parameters:  # since 0.19
        options["is_hybrid_cp"] = False
    for rank in range(ranks):
        monkeypatch.setattr(utils, "get_pg_size", lambda group: ranks)
        monkeypatch.setattr(utils, "get_pg_rank", lambda group, rank=rank: rank)
        batch = slices({"positions": positions}, cp_group=object(), **options)
        rows = zigzag_rows([LENGTH] * SAMPLES, rank, ranks)
        assert torch.equal(rows, batch["positions"].flatten())
