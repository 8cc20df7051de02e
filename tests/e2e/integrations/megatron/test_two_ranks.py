"""Two gloo processes with any parallelism find what one process finds."""

from __future__ import annotations

import pytest
import torch

from support.megatron import expert_parallel, tensor_parallel
from support.megatron.pipeline import recorded_stage, train_step
from support.scripts import run_script

pytestmark = [pytest.mark.megatron, pytest.mark.process]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return all that each of the two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_script("megatron/ranks.py", folder, ranks=2)
    return [torch.load(folder / f"found_{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def found(ranks):
    """Return the results of each rank of tensor and sequence parallelism, and of one process."""
    return *(rank["tensor"] for rank in ranks), tensor_parallel.find()


@pytest.fixture(scope="module")
def whole_step():
    return train_step()


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_every_rank_records_the_routes_of_all_positions(found):
    one, other, whole = found
    assert torch.equal(one["trace"], whole["trace"])
    assert torch.equal(other["trace"], whole["trace"])


def test_replaying_its_own_routes_keeps_every_bit(found):
    for rank in found:
        assert torch.equal(rank["own"]["logits"], rank["replayed"]["logits"])
        for name, gradient in rank["own"]["gradients"].items():
            assert torch.equal(gradient, rank["replayed"]["gradients"][name])


@pytest.mark.parametrize("case", ["own", "replayed", "foreign"])
def test_ranks_find_what_one_process_finds(found, case):
    *ranks, whole = found
    for rank in ranks:
        close(rank[case], whole[case])
    changed = whole["foreign"]["logits"] - whole["own"]["logits"]
    assert changed.abs().max() > 0.01  # other routes matter


def test_recompute_in_another_order(found):
    *ranks, whole = found
    for rank in found:
        assert rank["interleaved"].keys() == rank["recomputed"].keys()
        for name, gradient in rank["interleaved"].items():
            assert torch.equal(gradient, rank["recomputed"][name])
    for rank in ranks:
        close(rank["interleaved"], whole["interleaved"])


def test_a_rank_reports_its_own_positions_sample_by_sample(found):
    one, other, whole = found
    halves = whole["trace"].view(3, 2, 6, 3, 2)
    assert torch.equal(one["native"], halves[:, 0].flatten(0, 1))
    assert torch.equal(other["native"], halves[:, 1].flatten(0, 1))
    assert torch.equal(whole["native"], whole["trace"])


def test_a_rank_without_a_route_in_its_positions(found):
    """As with padding on the right. Had it raised alone, the other would wait for it."""
    for rank in found:
        assert torch.equal(rank["right padded"], rank["own"]["logits"])


def test_every_rank_finds_rows_in_megatrons_order_out(found):
    for rank in found:
        assert "not those of this forward" in rank["error"]


@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    [
        ("pipeline", "without_interleaving", [[(1,)], [(2, 3)]]),
        ("virtual stages", "with_interleaving", [[(), (2,)], [(1,), (3,)]]),
    ],
)
def test_stages_of_a_pipeline_with_recompute_keep_every_bit(
    ranks, whole_step, name, schedule, stages
):
    """Forwards and backwards alternate, and each layer's recompute finds its own micro-batch."""
    steps = [rank[name] for rank in ranks]
    assert all(step["schedule"].endswith(schedule) for step in steps)
    assert [step["stages"] for step in steps] == stages
    assert all(set(step["layers"]) == {(1, 2, 3)} for step in steps)
    assert torch.equal(torch.stack(steps[1]["losses"]), torch.stack(whole_step["losses"]))
    together = steps[0]["gradients"] | steps[1]["gradients"]
    expected = whole_step["gradients"]
    assert together.keys() == expected.keys()
    assert not [place for place in expected if not torch.equal(together[place], expected[place])]


def test_a_stage_records_its_own_layers(ranks):
    layers, ids = recorded_stage()
    assert layers == (1, 2, 3)
    (first, first_ids), (second, second_ids) = (rank["stage"] for rank in ranks)
    assert first + second == layers
    assert torch.equal(torch.cat([first_ids, second_ids], 1), ids)


def test_experts_of_another_rank_are_forced_too(ranks):
    for number, rank in enumerate(ranks):
        alone = expert_parallel.step(expert_parallel.make(), number)
        assert torch.equal(rank["experts"]["recorded"], alone["recorded"])
        close(rank["experts"]["logits"], alone["logits"])
        close(rank["experts"]["gradients"], alone["gradients"])
