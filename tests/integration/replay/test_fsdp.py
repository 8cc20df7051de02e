"""Two gloo processes equal one: FSDP2 with every rank's samples and their routes, tensor and expert
parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from onepolicy.config import UsageError
from onepolicy.replay import bind_routers
from support.models import make
from support.two_processes import (
    FAMILIES,
    PARALLEL,
    SHARDS,
    build,
    parallel_step,
    routed_batch,
    step,
    work,
)


@pytest.fixture(scope="module")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two processes over what the tests that are asked for look at."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    families = [name for name in FAMILIES if f"test_two_processes_equal_one[{name}]" in asked]
    forms = [name for name in PARALLEL if f"test_parallel_equals_one_process[{name}]" in asked]
    folder = tmp_path_factory.mktemp("fsdp")
    make("qwen3_moe").save_pretrained(folder / "model")
    torch.multiprocessing.spawn(work, (str(folder), families, forms), nprocs=2)
    return folder


@pytest.mark.process
@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_equal_one(family: str, sharded: Path) -> None:
    model = build(family, checkpointing=False)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = step(model, routed_batch(model), sorted(SHARDS[0] + SHARDS[1]), 1)
    moved = [n for n in before if not torch.equal(before[n], expected[n])]
    assert any("gate.weight" in name for name in moved)
    found = torch.load(sharded / f"{family}.pt")
    assert found.keys() == expected.keys()
    for name in ("loss", "norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    for name in moved:
        off = (found[name] - expected[name]).abs().max()
        # AdamW's first step is lr = 1e-2 or its opposite, but for gradients near its eps.
        assert off <= 5e-4, name


@pytest.mark.process
@pytest.mark.few(2)
@pytest.mark.parametrize("form", PARALLEL)
def test_parallel_equals_one_process(form: str, sharded: Path) -> None:
    """Tensor and expert parallelism."""
    model = AutoModelForCausalLM.from_pretrained(sharded / "model", dtype=torch.float32)
    expected, found = parallel_step(model), torch.load(sharded / f"{form}.pt")
    assert torch.equal(found.pop("routes"), expected.pop("routes"))  # margins are far above an ulp
    assert found.keys() == expected.keys()
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-6)


def test_a_router_without_the_whole_batch_is_refused() -> None:
    for plan, sizes, words in (
        ({}, {"pp_size": 2}, "pipeline parallelism"),
        ({"model.norm": "sequence_parallel"}, {}, "sequence_parallel"),
    ):
        model = make("qwen3_moe")
        model.config.distributed_config = DistributedConfig(**sizes)
        model.tp_plan = plan
        with pytest.raises(UsageError, match=words):
            bind_routers(model)


def test_a_router_sharded_by_other_means_is_refused(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        model = make("qwen3_moe")
        distribute_module(model.model.layers[1].mlp.gate, init_device_mesh("cpu", (1,)))
        words = r"layer 1: weight of 'model.layers.1.mlp.gate' is a DTensor"
        with pytest.raises(UsageError, match=words):
            bind_routers(model)
    finally:
        dist.destroy_process_group()
