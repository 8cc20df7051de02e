"""Two gloo processes with FSDP2, each with its samples and their routes, equal one process with all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import make
from test_learner import batch_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay import bind_routers
from onepolicy.train.forward import forward
from onepolicy.types import TokenBatch

SHARDS = ([0, 3, 4], [1, 2, 5, 6, 7])  # samples of each rank: unequal numbers of slots
FAMILIES = ("qwen3_moe", "deepseek_v3")  # softmax; sigmoid with groups, dense first


def build(family: str, *, checkpointing: bool) -> PreTrainedModel:
    model = make(family)
    prepare_for_training(model, torch.device("cpu"))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model


def routed_batch(model: PreTrainedModel) -> TokenBatch:
    """Samples with random routes, which no router would choose; a few rows without one."""
    batch, routers = batch_of(), bind_routers(model)
    assert batch.routing is not None
    valid = torch.arange(batch.num_slots) % 7 != 3
    routing = batch.routing.at(slice(None))
    ids, layers = routing.ids[:, : len(routers.layers)], routers.layers
    return batch.replace(routing=type(routing)(ids, valid, layers, routers.num_experts))


def step(model: PreTrainedModel, batch: TokenBatch, shard: list[int], ranks: int) -> dict[str, Tensor]:
    """One optimiser step on these samples. The denominator is the whole batch's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = batch.select(shard)
    with bind_routers(model).replay(mine.routing, native=True) as replayed:
        logp = forward(model, mine).logp
        loss = -(logp * batch.outcome[torch.tensor(shard)][mine.segment]).sum() / int(batch.trainable.sum())
        (loss * ranks).backward()  # FSDP2 averages over ranks
    assert len(replayed.native()) == mine.num_slots
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()} | {"loss": loss.detach(), "norm": norm}
    return {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        for family in FAMILIES:
            for checkpointing in (False, True):
                model = build(family, checkpointing=checkpointing)
                batch = routed_batch(model)
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
                found = step(model, batch, SHARDS[rank], 2)
                dist.all_reduce(found["loss"])
                if rank == 0:
                    torch.save(found, f"{folder}/{family}-{checkpointing}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_equal_one(family: str, checkpointing: bool, sharded: Path) -> None:
    model = build(family, checkpointing=checkpointing)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = step(model, routed_batch(model), sorted(SHARDS[0] + SHARDS[1]), 1)
    found = torch.load(sharded / f"{family}-{checkpointing}.pt")
    assert found.keys() == expected.keys()
    for name in ("loss", "norm"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    moved = [n for n in before if not torch.equal(before[n], expected[n])]
    assert any("gate.weight" in name for name in moved)
    for name in moved:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
