"""Replay where each rank has half of the experts, and tokens of its own."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

import onepolicy.integrations.megatron as op_megatron
from support.megatron.models import FULL_RECOMPUTE, SETTINGS, gradients, logits_of, loss_of
from support.megatron.pipeline import MODEL, chunk, micro_batches


def make(**parallel: int) -> Any:
    return chunk(TransformerConfig(**(SETTINGS | MODEL | FULL_RECOMPUTE | parallel)), None)


def step(model: Any, number: int) -> dict[str, Any]:
    """Return the routes that a rank records, and logits and gradients of its routers with routes
    that they did not choose."""
    tokens, trace = micro_batches()[number]
    with torch.no_grad(), op_megatron.record(model) as tape:
        logits_of(model, tokens)
    with op_megatron.replay(model, trace, batch=3, check=False):
        logits = logits_of(model, tokens)
    loss_of(logits, tokens).backward()
    found = {name: g for name, g in gradients(model).items() if name.endswith("router.weight")}
    return {"recorded": tape.trace().ids, "logits": logits.detach(), "gradients": found}
