"""Rows that are wrong beyond chance, on routes and scores that are made for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepolicy.replay.comparison import Scratch, better_experts
from onepolicy.replay.evidence import (
    LEAST_LACKING,
    MIN_EXPECTED,
    Comparison,
    WrongRows,
    chernoff,
    new_rows,
    weigh,
)
from onepolicy.replay.sample_checks import BETWEEN, some_rows
from onepolicy.types import RoutingTrace

SAMPLES, ROWS, LAYERS, TOP_K, EXPERTS = 10, 80, 4, 2, 32
BOUNDS = torch.arange(SAMPLES + 1) * ROWS


def scores(seed: int = 0) -> Tensor:  # [T, L, E]
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SAMPLES * ROWS, LAYERS, EXPERTS, generator=generator)


def right_routes(*, noise: float = 0.02) -> Tensor:
    """Return the choice [T, L, K] of scores that differ a little from `scores()`."""
    generator = torch.Generator().manual_seed(1)
    other = noise * torch.rand(scores().shape, generator=generator)
    return (scores() + other).topk(TOP_K).indices


def wrong_rows(ids: Tensor, own: Tensor | None = None) -> list[WrongRows]:
    own = scores() if own is None else own
    layers, top_k = ids.shape[1:]
    better = [
        better_experts(own[:, i], own[:, i].gather(-1, ids[:, i]), Scratch()) for i in range(layers)
    ]
    lacking = (torch.stack(better, 1) - (top_k - 1)).clamp(0, top_k)
    trace = RoutingTrace(
        ids.to(torch.uint8),
        torch.ones(len(ids), dtype=torch.bool),
        tuple(range(layers)),
        own.shape[2],
    )
    found = Comparison(lacking, trace, BOUNDS)
    wrong = found.wrong_rows()
    assert found.suspicious() or not wrong, "a forward that is not suspicious is not looked at"
    return wrong


def test_experts_that_score_above_the_lowest_replayed_one():
    row = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    for route, better in (([1, 2], 1), ([2, 1], 1), ([1, 3], 2), ([0, 3], 3)):
        assert better_experts(row, row[:, route], Scratch()).tolist() == [better]
    tied = torch.tensor([[0.5, 0.5, 0.5, 0.1]])
    assert better_experts(tied, tied[:, [0, 2]], Scratch()) == 0  # any two of the three


def test_evidence_of_a_row_by_hand():
    """0.9 expected, a quarter of it if wrong: log(0.775 / 0.1) for each expert that lacks, and
    log(0.25) for each that does not."""
    found = weigh(torch.tensor([3.0]), 4, torch.tensor([0.9]))
    assert found.item() == pytest.approx(3 * 2.04769 - 1.38629, abs=1e-4)
    assert chernoff(torch.tensor(0.5), 10, 0.9).item() == pytest.approx(5.10826, abs=1e-4)


def test_a_row_is_evidence_from_the_least_share_that_is_lacking():
    """The quick test of a forward rests on it: no agreement that is expected asks for less."""
    for p in torch.linspace(MIN_EXPECTED, 1.0, 50):
        below = weigh(torch.tensor(100 * LEAST_LACKING - 1e-3), 100, p)
        assert below < 0
    assert weigh(torch.tensor(100 * LEAST_LACKING + 1e-3), 100, torch.tensor(1.0)) > 0


def test_right_routes_are_found_right():
    assert wrong_rows(right_routes()) == []
    assert wrong_rows(right_routes(noise=0.2)) == []  # every sample differs in every third router


@pytest.mark.parametrize(("start", "stop"), [(240, 320), (243, 251), (312, 320), (275, 283)])
def test_a_run_of_wrong_rows_is_found_to_the_row(start, stop):
    ids = right_routes()
    ids[start:stop] = right_routes()[:80][: stop - start]
    (found,) = wrong_rows(ids)
    assert found.sample == 3
    assert abs(found.first - start) <= 1
    assert abs(found.last + 1 - stop) <= 1
    assert found.agreement < 0.3


def test_runs_do_not_cross_samples():
    ids = right_routes()
    ids[158:162] = right_routes()[:4]  # two rows at the end of one, two at the start of the next
    assert wrong_rows(ids) == []
    ids[156:164] = right_routes()[:8]
    ids[158:162] = right_routes()[158:162]
    assert wrong_rows(ids) == []


def test_scattered_rows_are_found_by_their_number():
    ids = right_routes()
    ids[400:480:4] = right_routes()[:20]
    (found,) = wrong_rows(ids)
    assert (found.sample, found.first, found.last, found.column) == (5, 400, 479, None)
    ids = right_routes()
    ids[::4] = right_routes().roll(40, 0)[::4]  # as often in every sample: it is not this sample
    assert wrong_rows(ids) == []


def test_one_layer_of_one_sample():
    ids = right_routes()
    ids[80:160, 2] = right_routes()[80:160, 1]
    (found,) = wrong_rows(ids)
    assert (found.sample, found.column) == (1, 2)


def test_several_samples_are_found():
    ids = right_routes()
    for sample in (2, 7):
        ids[BOUNDS[sample] : BOUNDS[sample + 1]] = right_routes()[:80]
    assert [found.sample for found in wrong_rows(ids)] == [2, 7]


def test_a_near_tie_in_a_text_that_repeats_itself_is_one_row():
    """One expert a token, and one hidden state in all rows: two layers of four have a near tie."""
    own = scores()
    own[160:240] = own[160].clone()
    ids = own.topk(1).indices
    ids[160:240, :2] = own[160:240, :2].topk(2).indices[..., 1:]
    assert wrong_rows(ids, own) == []
    own[160:240] = scores()[160:240]  # the same, but of rows that differ
    ids = own.topk(1).indices
    ids[160:240, :3] = own[160:240, :3].topk(2).indices[..., 1:]
    assert [found.sample for found in wrong_rows(ids, own)] == [2]


def test_new_rows_are_those_of_samples_that_do_not_repeat():
    ids = right_routes().to(torch.uint8)
    ids[80:160] = ids[80:82].repeat(40, 1, 1)
    ids[160:240] = ids[:80]
    trace = RoutingTrace(ids, torch.ones(len(ids), dtype=torch.bool), (0, 1, 2, 3), EXPERTS)
    new = new_rows(trace, BOUNDS)
    assert new[80:160].nonzero()[:, 0].tolist() == [0, 1]
    assert new[:80].all()
    assert new[160:].all()


def test_some_rows_of_every_sample():
    valid = torch.ones(300, dtype=torch.bool)
    valid[:7] = valid[150:160] = False
    bounds, before = torch.tensor([0, 100, 104, 110, 300]), torch.get_rng_state()
    found = [some_rows(valid, bounds, seed=seed) for seed in (1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    for rows in found:
        assert valid[rows].all()
        assert (rows.diff() > 0).all()
        parts = [rows[(rows >= a) & (rows < b)].tolist() for a, b in bounds.unfold(0, 2, 1)]
        assert [len(part) for part in parts] == [BETWEEN + 2, 4, 6, BETWEEN + 2]
        assert (parts[0][0], parts[0][-1]) == (7, 99)
        assert (parts[3][0], parts[3][-1]) == (110, 299)
        assert max(torch.tensor(parts[0]).diff()) <= 2 * 91 // BETWEEN + 1
    assert not torch.equal(*found)
