"""Record and replay with tensor and sequence parallelism, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

import onepolicy.integrations.megatron as op_megatron
from onepolicy.replay import RoutingError
from onepolicy.types import RoutingTrace
from support.megatron.models import (
    FULL_RECOMPUTE,
    gradients,
    logits_of,
    loss_of,
    make_model,
    tokens_of,
)
from support.replay_models import random_trace

MODEL = {
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 16,
    "gated_linear_unit": False,  # whose halves Megatron cuts per rank
    "params_dtype": torch.float32,
}
TOKENS, OTHERS = tokens_of(), tokens_of(seed=9)
ROUTES = random_trace(TOKENS.numel(), (1, 2, 3), 8, 2)


def routes() -> RoutingTrace:
    """Return routes that no router chose, with a few invalid rows."""
    valid = torch.arange(len(ROUTES)) % 5 != 2
    return RoutingTrace(ROUTES.ids, valid, ROUTES.layers, ROUTES.num_experts)


def summed(model: Any) -> dict[str, Tensor]:
    """Return the gradients of parameters that every rank has whole, over all positions."""
    found = {}
    sharded = {
        name: getattr(parameter, "sequence_parallel", False)
        for name, parameter in model.named_parameters()
    }
    for name, gradient in gradients(model).items():
        if sharded[name]:
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        if name.endswith("router.weight") or "layernorm" in name:
            found[name] = gradient
    return found


def step(model: Any, trace: RoutingTrace | None) -> dict[str, Any]:
    if trace is None:
        logits = logits_of(model, TOKENS)
    else:
        with op_megatron.replay(model, trace, batch=3, check=False):
            logits = logits_of(model, TOKENS)
    loss_of(logits, TOKENS).backward()
    return {"logits": logits.detach(), "gradients": summed(model)}


def interleaved(model: Any) -> dict[str, Tensor]:
    """Return the gradients of two micro-batches, the second one's backward first."""
    losses = []
    for tokens in (TOKENS, OTHERS):
        with op_megatron.replay(model, routes(), batch=3, check=False):
            losses.append(loss_of(logits_of(model, tokens), tokens))
    for loss in reversed(losses):
        loss.backward()
    return summed(model)


def error_of(model: Any, trace: RoutingTrace) -> str:
    try:
        with op_megatron.replay(model, trace, batch=3):
            logits_of(model, TOKENS)
    except RoutingError as error:
        return str(error)
    return ""


def right_padded(model: Any, ids: Tensor) -> Tensor:
    """Return the logits with routes of the first positions only: the second rank has none."""
    valid = torch.arange(len(ids)) % TOKENS.shape[1] < 5
    trace = RoutingTrace(ids, valid, ROUTES.layers, ROUTES.num_experts)
    with torch.no_grad(), op_megatron.replay(model, trace, batch=3):
        return logits_of(model, TOKENS)


def find(**changed: Any) -> dict[str, Any]:
    """Return everything that a rank finds."""
    model = make_model(**MODEL, **changed)
    with op_megatron.record(model) as tape:
        native = logits_of(model, TOKENS)
    loss_of(native, TOKENS).backward()
    trace = tape.trace()
    own = {"logits": native.detach(), "gradients": summed(model)}
    with torch.no_grad(), op_megatron.replay(model, trace, batch=3, native=True) as handle:
        logits_of(model, TOKENS)
    return {
        "trace": trace.ids,
        "own": own,
        "replayed": step(model, trace),
        "foreign": step(model, routes()),
        "interleaved": interleaved(model),
        "recomputed": interleaved(make_model(**MODEL, **FULL_RECOMPUTE, **changed)),
        "native": handle.native().ids,
        "right padded": right_padded(model, trace.ids),
        "error": error_of(model, trace.at(torch.arange(36).view(3, 12).T.reshape(-1))),
    }
