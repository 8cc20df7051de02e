"""The same code on a CUDA device: run with `pytest -m gpu`. CI runs none of these."""

import pytest
import torch

from onepolicy.cli import main
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.routers import bind_routers
from support.gpu import CUDA, need_commands
from support.metrics import rows
from support.models import MOE, VOCAB, make

pytestmark = CUDA


@pytest.fixture
def cuda():
    return torch.device("cuda")


@pytest.mark.parametrize("name", MOE)
def test_packed_forward_equals_the_cpu(name, cuda):
    lengths = (20, 7, 31)
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])
    logits = []
    for device in (torch.device("cpu"), cuda):
        model = make(name).to(device)
        prepare_for_training(model, device)
        packing = BucketedPacking.of(bounds, device)
        inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
        logits.append(model(**inputs, use_cache=False, packing=packing).logits[0].cpu())
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", MOE)
def test_replaying_its_own_routes_changes_no_bit(name, cuda):
    model = make(name).to(cuda)
    bind_routers(model).self_test()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_on_the_gpu(recipe, tmp_path, dtype):
    need_commands()
    out = tmp_path / "run"
    overrides = ["train.device=cuda", f"rollout.engine.dtype={dtype}", "steps=2"]
    assert main(["train", str(recipe), f"out={out}", *overrides]) == 0
    last = rows(out)[-1]
    assert last["train/grad_norm"] > 0
    assert last["mismatch/k3"] < 1e-2
