"""One packed micro-batch through the model: log-probabilities and entropy of its trainable slots."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.models.packed_attention import Packing
from onepolicy.types import TokenBatch

LOGP = (
    "log_softmax of float32 logits / temperature, then gather"  # for the contract with the engine
)


class Scored(NamedTuple):
    logp: Tensor  # [T] float32, 0 where not trainable; carries the graph
    entropy: Tensor  # [T] float32, 0 where not trainable; carries the graph if asked for
    top: (
        Tensor | None
    )  # [T, k] float32, log-probabilities of batch.top_ids, else as `logp`; None if it has none
    own: tuple[Tensor, Tensor] | None = (
        None  # [T, k] int32, float32: the model's likeliest tokens, if asked for
    )


class Places(NamedTuple):
    """What a forward takes from the values of a batch, not only from its shapes."""

    slots: Tensor  # [n] int64, trainable slots
    packing: Packing


def forward(
    model: PreTrainedModel,
    batch: TokenBatch,
    places: Places | None = None,
    /,
    *,
    autocast: torch.dtype | None = None,
    entropy_graph: bool = False,
    trainer_top: bool = False,
) -> Scored:
    """`batch` is on the model's device. Only trainable slots reach the vocabulary projection.

    Log-probabilities are fp32 `log_softmax(logits / temperature)` then gather: the same as the rollout engine's.
    """
    device = batch.input_ids.device
    slots, packing = places or (batch.trainable.nonzero()[:, 0], None)
    logps = torch.log_softmax(
        tempered_logits(model, batch, slots, packing=packing, autocast=autocast), -1
    )
    picked = logps.gather(-1, batch.target_ids[slots, None])[:, 0]
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropy = entropy_of(logps)
    zeros = torch.zeros(batch.num_slots, dtype=torch.float32, device=device)
    top = own = None
    if batch.top_ids is not None:
        blank = zeros.new_zeros(batch.top_ids.shape)
        top = blank.index_copy(0, slots, logps.gather(-1, batch.top_ids[slots].long()))
        if trainer_top:
            best, ids = logps.detach().topk(blank.shape[1], -1)
            own = blank.int().index_copy(0, slots, ids.int()), blank.index_copy(0, slots, best)
    return Scored(zeros.index_copy(0, slots, picked), zeros.index_copy(0, slots, entropy), top, own)


def entropy_of(logps: Tensor) -> Tensor:
    """[n] nats: -sum p log p of each row of log-probabilities [n, vocabulary].

    A token that the head rules out (log p = -inf) adds 0, to the value and to the gradient: p log p tends to 0.
    """
    entropy: Tensor = _Entropy.apply(logps)
    return entropy


class _Entropy(torch.autograd.Function):
    """By hand, because autograd's gradient of p log p is NaN at -inf, and because it would keep two tables more."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor) -> Tensor:
        ctx.save_for_backward(logps)
        ruled_out = logps == -math.inf  # not `p == 0`: a NaN must stay one
        return -logps.exp().mul_(logps).masked_fill_(ruled_out, 0.0).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logps,) = ctx.saved_tensors
        slope = logps.exp().mul_(logps + 1).masked_fill_(logps == -math.inf, 0.0)
        return slope.mul_(-grad[..., None])


def tempered_logits(
    model: PreTrainedModel,
    batch: TokenBatch,
    slots: Tensor,  # [n] int64
    *,
    packing: Packing | None = None,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """[n, vocabulary] float32: the logits of these slots of a packed batch, divided by their sample's temperature."""
    device = batch.input_ids.device
    cast: AbstractContextManager = (
        torch.autocast(device.type, autocast) if autocast else nullcontext()
    )
    with cast:
        logits = model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=slots,
            packing=packing
            or Packing.of(batch.cu_seqlens, device, multiple=TILE if is_invariant(model) else 1),
        ).logits[0]
    return logits.float() / batch.temperature[batch.segment[slots], None]
