"""Two gloo processes equal one: FSDP2 with every rank's samples and their routes, tensor and expert
parallelism."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from onepolicy.config import UsageError
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay import bind_routers
from onepolicy.train.forward import forward
from onepolicy.types import TokenBatch
from support.learner_steps import batch_of
from support.models import make
from support.replay_models import loss_and_grads, random_trace, tokens

SHARDS = ([0, 3, 4], [1, 2, 5, 6, 7])  # samples of each rank: unequal numbers of slots
FAMILIES = ("qwen3_moe", "deepseek_v3")  # softmax; sigmoid with groups, dense first
TOKENS = tokens(4, 6)
MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
PARALLEL = {
    "tensor": {"tp_size": 2},
    "expert_dispatch": {"tp_size": 2, "ep_size": 2},
    "expert_masked": {"tp_size": 2, "ep_size": 2, "ep_plan": MASKED},
}


def build(family: str, *, checkpointing: bool) -> PreTrainedModel:
    model = make(family)
    prepare_for_training(model, torch.device("cpu"))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model


def routed_batch(model: PreTrainedModel) -> TokenBatch:
    """Return samples with random routes that no router would choose, and a few rows without a
    route."""
    batch, routers = batch_of(), bind_routers(model)
    assert batch.routing is not None
    valid = torch.arange(batch.num_slots) % 7 != 3
    routing = batch.routing.at(slice(None))
    ids, layers = routing.ids[:, : len(routers.layers)], routers.layers
    return batch.replace(routing=type(routing)(ids, valid, layers, routers.num_experts))


def step(
    model: PreTrainedModel, batch: TokenBatch, shard: list[int], ranks: int
) -> dict[str, Tensor]:
    """Make one optimiser step on these samples. The denominator is the whole batch's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = batch.select(shard)
    with bind_routers(model).replay(mine.routing, native=True, check=False) as replayed:
        logp = forward(model, mine).logp
        loss = -(logp * batch.outcome[torch.tensor(shard)][mine.segment]).sum() / int(
            batch.trainable.sum()
        )
        (loss * ranks).backward()  # FSDP2 averages over ranks
    assert len(replayed.native()) == mine.num_slots
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()} | {
        "loss": loss.detach(),
        "norm": norm,
    }
    return {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}


def parallel_step(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return logits and gradients with random routes, and the model's own routes, of a batch that
    all ranks have."""
    routers = bind_routers(model)
    with torch.no_grad(), routers.record() as tape:
        model(input_ids=TOKENS, use_cache=False)
    routes = random_trace(TOKENS.numel(), routers.layers, routers.num_experts, routers.top_k)
    with routers.replay(routes, check=False):
        logits, grads = loss_and_grads(model, TOKENS)
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return whole | {"logits": logits, "routes": tape.trace().ids}


def run_parallel(rank: int, folder: str) -> None:
    for name, sizes in PARALLEL.items():
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
        )
        found = parallel_step(model)
        if rank == 0:
            torch.save(found, f"{folder}/{name}.pt")
    with pytest.raises(UsageError, match="ep_router"), bind_routers(model).record(weights=True):
        pass


def work(rank: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
    }  # transformers reads them
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
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
        run_parallel(rank, folder)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    make("qwen3_moe").save_pretrained(folder / "model")
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
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", PARALLEL)
def test_tensor_and_expert_parallel_equal_one_process(name: str, sharded: Path) -> None:
    expected = parallel_step(
        AutoModelForCausalLM.from_pretrained(sharded / "model", dtype=torch.float32)
    )
    found = torch.load(sharded / f"{name}.pt")
    assert found.keys() == expected.keys()
    assert torch.equal(
        found.pop("routes"), expected.pop("routes")
    )  # margins of this model are far above an ulp
    for tensor in expected:
        torch.testing.assert_close(found[tensor], expected[tensor], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("plan", "sizes", "words"),
    [
        ({}, {"pp_size": 2}, "pipeline parallelism"),
        ({"model.norm": "sequence_parallel"}, {}, "sequence_parallel"),
    ],
)
def test_a_router_without_the_whole_batch_is_refused(plan: dict, sizes: dict, words: str) -> None:
    model = make("qwen3_moe")
    model.config.distributed_config = DistributedConfig(**sizes)
    model.tp_plan = plan
    with pytest.raises(UsageError, match=words):
        bind_routers(model)


def test_a_router_sharded_by_other_means_is_refused(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        model = make("qwen3_moe")
        distribute_module(model.model.layers[1].mlp.gate, init_device_mesh("cpu", (1,)))
        with pytest.raises(
            UsageError, match=r"layer 1: weight of 'model.layers.1.mlp.gate' is a DTensor"
        ):
            bind_routers(model)
    finally:
        dist.destroy_process_group()
