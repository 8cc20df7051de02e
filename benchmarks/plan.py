"""Bytes that `onepolicy plan` predicts of a learner's step, beside those that a step holds: both sum tensors' storages.

    python benchmarks/plan.py                            # the tiny policy's shape and 196M parameters, one process
    python benchmarks/plan.py --models tiny --dtype bfloat16

The measured step is the second one of a real LocalLearner on the CPU, with routes replayed: parameters, AdamW's state
and the most of everything else that is alive at once.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from engine import build_model
from sync import big_model
from transformers import PreTrainedModel

from onepolicy.config import RunConfig, resolve
from onepolicy.models.prepare import prepare_for_training
from onepolicy.plan.dims import read_dims
from onepolicy.plan.dry import DryModel, Held, Micro
from onepolicy.plan.memory import compute_dtype, learner_memory
from onepolicy.plan.peak import Peak
from onepolicy.replay.routers import bind_routers
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import pack
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

    @property
    def slots(self) -> int:
        return self.prompt + self.response - 1

    @property
    def micro(self) -> Micro:
        count = self.samples // self.micro_batches
        return Micro((self.slots,) * count, (self.response,) * count)

    def config(self) -> RunConfig:
        train = {
            "tokens_per_micro_batch": self.slots * self.samples // self.micro_batches,
            "activation_checkpointing": self.checkpointing,
            "device": "cpu",
        }
        tree = {"out": "unused", "steps": 4, "task": {"kind": "chain"}, "train": train}
        return resolve(tree | {"model": {"path": "unused", "dtype": self.dtype}, "replay": {"min_agreement": 0}})


def measured(model: PreTrainedModel, case: Case) -> float:
    """Bytes of the second step."""
    model.to(getattr(torch, case.dtype))
    prepare_for_training(model, CPU)
    learner = LocalLearner(model, case.config(), routers=bind_routers(model))
    step(learner, case)
    state = [t for own in learner.optimizer.state.values() for t in own.values() if isinstance(t, torch.Tensor)]
    standing = [*model.parameters(), *state]
    with Peak(standing) as peak:
        step(learner, case)
    return peak.peak + sum(tensor.nbytes for tensor in standing)


def step(learner: LocalLearner, case: Case) -> None:
    batch = learner.score(pack([Group(0, tuple(sample(learner, case, i) for i in range(case.samples)))]))
    zeros = torch.zeros(batch.num_slots)
    batch = batch.replace(advantage=zeros + 1, weight=zeros + 1, keep=batch.trainable)
    learner.step(batch)


def sample(learner: LocalLearner, case: Case, seed: int) -> Sample:
    """Random tokens with random routes."""
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


def predicted(model: PreTrainedModel, case: Case) -> float:
    config = case.config()
    dry = DryModel(model.config, dtype=getattr(torch, compute_dtype(config)), cpu=True)
    first = case.micro_batches == 1
    held = dry.held(case.micro, checkpointing=case.checkpointing, first=first)
    dims = read_dims(dry.model, "unused")
    if first:
        held = Held(held.saved, held.peak - sum(p.nbytes for p in dry.model.parameters()), held.logits)
    return learner_memory(dims, config, 1, held, slots=sum(case.micro.slots), graphs=1).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        for micro_batches in (1, 2):
            for checkpointing in (False, True):
                case = Case(micro_batches=micro_batches, dtype=args.dtype, checkpointing=checkpointing)
                guess, found = predicted(MODELS[name](), case), measured(MODELS[name](), case)
                print(
                    f"{name}: {micro_batches} micro-batches, checkpointing {'on ' if checkpointing else 'off'}: "
                    f"predicted {guess / 1e6:7.1f} MB, measured {found / 1e6:7.1f} MB, off by {guess / found - 1:+.1%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
