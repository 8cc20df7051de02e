"""Rows of our traces against positions that verl's own functions lay out."""

from __future__ import annotations

import pytest
import torch

from onepolicy.types import RoutingTrace

pytestmark = pytest.mark.verl
LENGTHS = [5, 2, 6]


@pytest.fixture(scope="module")
def routes():
    """Return three samples whose row t of sample i has the ids 16 i + t."""
    from onepolicy.integrations.verl.routes import MicroBatchRoutes

    traces = []
    for i, length in enumerate(LENGTHS):
        ids = (16 * i + torch.arange(length - 1)).to(torch.uint8).view(-1, 1, 1)
        traces.append(RoutingTrace(ids, torch.ones(length - 1, dtype=torch.bool), (0,), 64))
    return MicroBatchRoutes(traces, LENGTHS, [True] * 3)


def packed_positions():
    """Return [1, T] 1 + 16 i + t of every token but each sample's last, which is 0, as padding."""
    rows = [torch.arange(n) + 16 * i + 1 for i, n in enumerate(LENGTHS)]
    for row in rows:
        row[-1] = 0
    return torch.cat(rows)[None]


def check(trace, positions):
    assert trace.valid.tolist() == (positions != 0).tolist()
    assert trace.ids[trace.valid].flatten().tolist() == (positions[positions != 0] - 1).tolist()


@pytest.mark.parametrize("bucket", [0, 3])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (0, 4), (3, 4)])
def test_packed_bucketed_and_sliced_as_verl_does(monkeypatch, routes, bucket, rank, ranks):
    """prepare_model_inputs pads to a bucket, then Ulysses pads again and slices."""
    from verl.utils import ulysses
    from verl.workers.engine.utils import pad_packed_inputs

    monkeypatch.setattr(ulysses.dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(ulysses.dist, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(ulysses, "get_ulysses_sequence_parallel_group", lambda: "sp")
    positions, _ = pad_packed_inputs(packed_positions(), None, bucket)
    if ranks > 1:
        positions, _, pad = ulysses.ulysses_pad_and_slice_inputs(positions, None, ranks)
        bucket += pad
    check(routes.laid_out(None, bucket, rank=rank, ranks=ranks), positions[0])


def test_padded_as_verl_does(routes):
    from verl.workers.utils.padding import build_attention_mask_from_nested

    tokens = torch.nested.nested_tensor_from_jagged(
        packed_positions()[0], torch.tensor([0, 5, 7, 13])
    )
    mask = build_attention_mask_from_nested(tokens, 6)
    padded = torch.nested.to_padded_tensor(tokens, padding=0, output_size=(3, 6))
    trace = routes.laid_out(mask, 0)
    check(trace, padded.flatten())
    for part, length in zip(routes.split(trace, mask), LENGTHS, strict=True):
        assert len(part) == length
