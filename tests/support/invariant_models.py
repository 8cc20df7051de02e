"""An engine and a trainer of one model with on-policy numerics, and their differences on the same
tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from onepolicy.config import HFEngineConfig
from onepolicy.invariant.mode import install_invariant
from onepolicy.models.prepare import prepare_for_training
from onepolicy.replay.layers import is_moe
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.support.trace import SupportTrace
from onepolicy.train.forward import forward
from onepolicy.train.pack import pack
from onepolicy.types import Completion, Group, Sample, TokenBatch
from support.models import make

CPU = torch.device("cpu")


def trainer_of(model: PreTrainedModel, *, fast: bool = False) -> PreTrainedModel:
    trained = copy.deepcopy(model)
    prepare_for_training(trained, model.device)
    if not fast:
        install_invariant(trained)
    return trained


def engine_of(
    model: PreTrainedModel, *, max_num_seqs: int = 5, max_len: int = 256, **settings: object
) -> HFEngine:
    """Return an engine with a copy of the model."""
    config = HFEngineConfig(
        dtype=str(model.dtype).removeprefix("torch."), max_num_seqs=max_num_seqs, **settings
    )
    return HFEngine(
        copy.deepcopy(model),
        config,
        return_routes=is_moe(model.config),
        max_len=max_len,
        numerics="on-policy",
    )


def pair(
    name: str, dtype: str, device: torch.device = CPU, **settings: object
) -> tuple[HFEngine, PreTrainedModel, Routers | None]:
    model = make(name, dtype=getattr(torch, dtype)).to(device)
    trained = trainer_of(model)
    routers = bind_routers(trained) if is_moe(model.config) else None
    return engine_of(model, **settings), trained, routers


def batch_of(requests: Sequence[tuple], completions: Sequence[Completion]) -> TokenBatch:
    """Return the batch of these requests: (prompt, sampling, seed)."""
    samples = []
    for (prompt, sampling, _), done in zip(requests, completions, strict=True):
        tokens = torch.cat([torch.tensor(prompt, dtype=torch.int32), done.token_ids])
        trainable = torch.arange(len(tokens) - 1) >= len(prompt) - 1
        logp = torch.full((len(tokens) - 1,), float("nan"))
        logp[trainable] = done.logp
        places = trainable.int() - 1
        temperature, routes = sampling.temperature, done.routing
        support = done.support
        if support is not None:
            support = SupportTrace.concat([SupportTrace.missing(len(prompt) - 1), support])
        samples.append(
            Sample(
                tokens,
                trainable,
                logp,
                places,
                places,
                temperature,
                0.0,
                done.finish,
                routes,
                outcome=0.0,
                support=support,
            )
        )
    return pack([Group(0, tuple(samples))])


@torch.no_grad()
def differing(
    model: PreTrainedModel,
    routers: Routers | None,
    batch: TokenBatch,
    splits: Sequence[Sequence[int]],
) -> tuple[int, int]:
    """Return the log-probabilities and routed slots that differ when a trainer scores these
    micro-batches."""
    logps = routes = 0
    for chosen in splits:
        micro = batch.select(list(chosen)).to(model.device)
        if routers is None:
            logp = forward(model, micro).logp
        else:
            with routers.record() as tape:
                logp = forward(model, micro).logp
            routes += int((tape.trace().ids != micro.routing.ids).any(-1).any(-1).sum())
        logps += int((logp != micro.logp_rollout).sum())
    return logps, routes
