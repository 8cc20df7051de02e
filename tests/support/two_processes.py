"""Replayed steps on two gloo processes, which import this module by its name."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
FAMILIES = {"qwen3_moe": True, "deepseek_v3": False}
"""Softmax, with checkpoints; sigmoid with groups, dense first, without."""
TOKENS = tokens(4, 6)
MASKED = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
PARALLEL = {
    "expert_dispatch": {"tp_size": 2, "ep_size": 2},
    "tensor": {"tp_size": 2},
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
        outcome = batch.outcome[torch.tensor(shard)][mine.segment]
        loss = -(logp * outcome).sum() / int(batch.trainable.sum())
        (loss * ranks).backward()  # FSDP2 averages over ranks
    assert len(replayed.native()) == mine.num_slots
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    weights |= {"loss": loss.detach(), "norm": norm}
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


def run_parallel(rank: int, folder: str, names: Sequence[str]) -> None:
    for name in names:
        sizes = PARALLEL[name]
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", dtype=torch.float32, distributed_config=DistributedConfig(**sizes)
        )
        found = parallel_step(model)
        if rank == 0:
            torch.save(found, f"{folder}/{name}.pt")
        if name == "expert_masked":
            with (
                pytest.raises(UsageError, match="ep_router"),
                bind_routers(model).record(weights=True),
            ):
                pass


def work(rank: int, folder: str, families: Sequence[str], names: Sequence[str]) -> None:
    # transformers reads them
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        mesh = init_device_mesh("cpu", (2,))
        for family in families:
            model = build(family, checkpointing=FAMILIES[family])
            batch = routed_batch(model)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            found = step(model, batch, SHARDS[rank], 2)
            dist.all_reduce(found["loss"])
            if rank == 0:
                torch.save(found, f"{folder}/{family}.pt")
        run_parallel(rank, folder, names)
    finally:
        dist.destroy_process_group()
