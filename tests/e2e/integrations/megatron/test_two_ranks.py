"""Tensor and sequence parallelism on two gloo processes give the results of one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(900)]


def run(*arguments: str) -> None:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    script = str(ROOT / "tests" / "support" / "megatron" / "ranks.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, script, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what each of two ranks found, and what one process finds."""
    from support.megatron.ranks import find

    folder = tmp_path_factory.mktemp("ranks")
    run(str(folder))
    ranks = [torch.load(folder / f"found_{rank}.pt") for rank in range(2)]
    return *ranks, find()


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


def test_every_rank_finds_rows_in_megatrons_order_out(found):
    for rank in found:
        assert "not those of this forward" in rank["error"]
