"""Bytes that `onepolicy plan` predicts of a learner's step, beside those that a step holds: both
sum tensors' storages.

    python benchmarks/plan.py                      # the tiny policy's shape and 196M parameters
    python benchmarks/plan.py --models tiny --dtype bfloat16
    python benchmarks/plan.py --ranks 2            # the first of two ranks (FSDP2 over gloo)
    python benchmarks/plan.py --ranks 2 --compute bfloat16
    python benchmarks/plan.py --state host         # optim.state: on the device, and on the host
    python benchmarks/plan.py --logits-chunk 64
    python benchmarks/plan.py --lora 8             # adapters of this rank, all but routers

The measured step is the second one of a real LocalLearner on the CPU, with routes replayed:
parameters, AdamW's state and the most of everything else that is alive at once. A rank has as many
samples as the one process. With `--state host` the device and the host are two memories for AdamW's
state: it is copied where a GPU would copy it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onepolicy.train.scorer import PolicyScorer

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from engine import build_model
from sync import big_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from onepolicy.config import RunConfig, resolve
from onepolicy.config.lora import LoraConfig
from onepolicy.models.logits_chunks import install_logits_chunks
from onepolicy.models.prepare import prepare_for_training
from onepolicy.plan.dims import read_dims
from onepolicy.plan.learner_memory import learner_memory
from onepolicy.replay.routers import bind_routers
from onepolicy.sync.adapters import add_adapter
from onepolicy.train import streamed_adamw
from onepolicy.train.dry_run import DryRunModel, MicroBatchShape, PeakMemory, compute_dtype
from onepolicy.train.learner import LocalLearner
from onepolicy.train.memory import rank_state, with_adapters
from onepolicy.train.pack import pack
from onepolicy.train.sharded.fsdp import FSDPSharding
from onepolicy.train.streamed_adamw import HostAdamW
from onepolicy.types import Group, RoutingTrace, Sample, id_dtype

CPU = torch.device("cpu")
MODELS = {"tiny": build_model, "big": big_model}


@dataclass(frozen=True, slots=True)
class Case:
    samples: int = 8
    prompt: int = 40
    response: int = 80
    micro_batches: int = 2
    dtype: str = "float32"
    checkpointing: bool = False
    ranks: int = 0
    compute: str = "same"
    numerics: str = "fast"
    logits_chunk: int = 0
    state: str = "device"
    lora: int = 0

    @property
    def slots(self) -> int:
        return self.prompt + self.response - 1

    @property
    def micro(self) -> MicroBatchShape:
        count = self.samples // self.micro_batches
        return MicroBatchShape((self.slots,) * count, (self.response,) * count)

    def config(self) -> RunConfig:
        train = {
            "tokens_per_micro_batch": self.slots * self.samples // self.micro_batches,
            "activation_checkpointing": self.checkpointing,
            "device": "cpu",
            "ranks": self.ranks,
            "fsdp_param_dtype": self.compute,
            "logits_chunk": self.logits_chunk,
        }
        tree = {"out": "unused", "steps": 4, "task": {"kind": "chain"}, "train": train}
        tree |= {"model": {"path": "unused", "dtype": self.dtype}, "numerics": self.numerics}
        tree |= {"optim": {"state": self.state}}
        if self.lora:
            train["lora"] = {"rank": self.lora}
        return resolve(tree | {"replay": {"min_agreement": 0}})


@dataclass(frozen=True, slots=True)
class Tiers:
    """Bytes of the first rank in each memory."""

    device: float
    host: float = 0.0


class TwoMemories(HostAdamW):
    """HostAdamW that copies on a CPU as it does beside a GPU."""

    def fetch(self, parameter: Tensor, kept: Tensor) -> Tensor:
        return kept.clone()

    def put(self, parameter: Tensor, key: str, value: Tensor, kept: Tensor | None) -> Tensor:
        if kept is None:
            return value.clone()
        return kept.copy_(value)


class PeakInside(PeakMemory):
    """PeakMemory that counts what torchao's tensors compute inside."""

    def __torch_dispatch__(self, func: Any, types: Any, *rest: Any) -> Any:
        if any(hasattr(each, "tensor_attrs") for each in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, *rest)


def measured(name: str, case: Case) -> Tiers:
    """Return the bytes of the second step."""
    if not case.ranks:
        return _measured(MODELS[name](), case, None)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(name, case, folder), nprocs=case.ranks)
        return Tiers(*json.loads((Path(folder) / "bytes").read_text()))


def _rank(rank: int, name: str, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks
    )
    mesh = init_device_mesh("cpu", (case.ranks,))
    compute = None if case.compute == "same" else getattr(torch, case.compute)
    found = _measured(MODELS[name](), case, FSDPSharding(mesh, compute))
    if rank == 0:
        (Path(folder) / "bytes").write_text(json.dumps([found.device, found.host]))
    dist.barrier()
    dist.destroy_process_group()


def _measured(model: PreTrainedModel, case: Case, sharding: FSDPSharding | None) -> Tiers:
    streamed_adamw.HostAdamW = TwoMemories
    model.to(getattr(torch, case.dtype))
    if sharding is not None:
        sharding.shard(model)
    prepare_for_training(model, CPU, compute=None if sharding is None else sharding.compute)
    if case.lora:
        add_adapter(model, LoraConfig(rank=case.lora), "unused", seed=0)
    if case.logits_chunk:
        install_logits_chunks(model, case.logits_chunk)
    learner = LocalLearner(PolicyScorer(model, case.config(), routers=bind_routers(model)))
    step(learner, case)
    state = [
        part
        for own in learner.optimizer.state.values()
        for tensor in own.values()
        for part in parts(tensor)
    ]
    on_device = [part for parameter in model.parameters() for part in parts(parameter)]
    on_host = state
    if case.state != "host":
        on_device, on_host = [*on_device, *state], []
    with PeakInside([*on_device, *on_host]) as peak, resizes(peak):
        step(learner, case)
    device = peak.peak + sum(tensor.nbytes for tensor in on_device)
    return Tiers(device, sum(tensor.nbytes for tensor in on_host))


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors whose storages hold it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return [getattr(tensor, name) for name in getattr(tensor, "tensor_attrs", ())] or [tensor]


@contextmanager
def resizes(peak: PeakMemory) -> Iterator[None]:
    """Return whether the call resizes a storage. FSDP2 frees gathered tensors by resizing to
    nothing, and fills them again later."""
    own = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> object:
        found = own(storage, size)
        peak.count_resized(storage)
        return found

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = own


def step(learner: LocalLearner, case: Case) -> None:
    batch = learner.score(
        pack([Group(0, tuple(sample(learner, case, i) for i in range(case.samples)))])
    )
    zeros = torch.zeros(batch.num_slots)
    batch = batch.replace(advantage=zeros + 1, weight=zeros + 1, keep=batch.trainable)
    learner.step(batch)


def sample(learner: LocalLearner, case: Case, seed: int) -> Sample:
    """Return random tokens with random routes."""
    random = torch.Generator().manual_seed(seed)
    routers, total = learner.routers, case.prompt + case.response
    assert routers is not None
    tokens = torch.randint(3, 30, (total,), generator=random, dtype=torch.int32)
    trainable = torch.arange(total - 1) >= case.prompt - 1
    scores = torch.rand(total - 1, len(routers.layers), routers.num_experts, generator=random)
    ids = scores.topk(routers.top_k).indices.to(id_dtype(routers.num_experts))
    valid = torch.ones(total - 1, dtype=torch.bool)
    return Sample(
        tokens=tokens,
        trainable=trainable,
        logp_rollout=torch.full((total - 1,), -1.0).where(trainable, float("nan")),
        version=torch.zeros(total - 1, dtype=torch.int32),
        turn=torch.zeros(total - 1, dtype=torch.int32),
        temperature=1.0,
        reward=0.0,
        finish="stop",
        outcome=1.0,
        routing=RoutingTrace(ids, valid, routers.layers, routers.num_experts),
    )


def predicted(name: str, case: Case) -> Tiers:
    config = case.config()
    dry = DryRunModel(
        MODELS[name]().config,
        dtype=getattr(torch, compute_dtype(config)),
        cpu=True,
        logits_chunk=case.logits_chunk,
        invariant=case.numerics == "on-policy",
    )
    dims = read_dims(dry.model, "unused")
    if case.lora:
        dims = with_adapters(dims, dry.model, LoraConfig(rank=case.lora))
        dry.add_adapters(LoraConfig(rank=case.lora))
    first = case.micro_batches == 1
    held = dry.micro_batch_memory(
        case.micro, checkpointing=case.checkpointing, first=first and not case.ranks
    )
    memory = learner_memory(
        dims,
        config,
        max(1, case.ranks),
        held,
        slots=sum(case.micro.slots),
        graphs=1,
        first=first,
        cpu=True,
    )
    state = rank_state(dims, config, max(1, case.ranks), cpu=True)
    return Tiers(memory.total, state.optimiser.host)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--ranks", type=int, default=0, help="processes that share the learner; 0: one, unsharded"
    )
    parser.add_argument("--numerics", choices=("fast", "on-policy"), default="fast")
    parser.add_argument(
        "--compute",
        choices=("same", "bfloat16"),
        default="same",
        help="train.fsdp_param_dtype of ranks",
    )
    parser.add_argument("--state", choices=("device", "host", "8bit"), default="device")
    parser.add_argument("--logits-chunk", type=int, default=0, help="slots; 0: all at once")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters; 0: all weights train"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        for micro_batches in (1, 2):
            for checkpointing in (False, True):
                case = replace(
                    Case(
                        dtype=args.dtype,
                        ranks=args.ranks,
                        compute=args.compute,
                        numerics=args.numerics,
                        state=args.state,
                        logits_chunk=args.logits_chunk,
                        lora=args.lora,
                    ),
                    micro_batches=micro_batches,
                    checkpointing=checkpointing,
                )
                guess, found = predicted(name, case), measured(name, case)
                print(
                    f"{name}: {micro_batches} micro-batches, "
                    f"checkpointing {'on ' if checkpointing else 'off'}: "
                    f"{describe(guess.device, found.device)}",
                    flush=True,
                )
                if found.host:
                    print(f"    on the host: {describe(guess.host, found.host)}", flush=True)


def describe(guess: float, found: float) -> str:
    return (
        f"predicted {guess / 1e6:7.1f} MB, measured {found / 1e6:7.1f} MB, "
        f"off by {guess / found - 1:+.1%}"
    )


if __name__ == "__main__":
    main()
