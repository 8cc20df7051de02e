"""The forward of one packed micro-batch: log-probabilities and entropy of its trainable slots."""

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

# Text for the numerics contract, which must be equal to the engine's.
LOGP = "log_softmax of float32 logits / temperature, then gather"


class Scored(NamedTuple):
    """Scores of a micro-batch's slots."""

    logp: Tensor  # [T] float32, 0 where not trainable; carries the graph
    entropy: Tensor  # [T] float32, 0 where not trainable; carries the graph if asked for
    # [T, k] float32, log-probabilities of batch.top_ids, as `logp`; None if the batch has none
    top: Tensor | None
    # [T, k] int32, float32: the model's likeliest tokens and their log-probabilities, if asked for
    trainer_top: tuple[Tensor, Tensor] | None = None


class SlotLayout(NamedTuple):
    """Everything that a forward derives from the values of a batch, not from its shapes alone."""

    slots: Tensor  # [n] int64, trainable slots
    packing: Packing


def forward(
    model: PreTrainedModel,
    batch: TokenBatch,
    layout: SlotLayout | None = None,
    /,
    *,
    autocast: torch.dtype | None = None,
    entropy_graph: bool = False,
    trainer_top: bool = False,
) -> Scored:
    """Score a batch that is on the model's device.

    Only trainable slots reach the vocabulary projection. Log-probabilities are
    `log_softmax(logits / temperature)` in float32, then gather, as in the rollout engine.
    entropy_graph: the entropy carries the graph. trainer_top: fill `Scored.trainer_top` if the
    batch has `top_ids`.
    """
    if layout is None:
        slots, packing = batch.trainable.nonzero()[:, 0], None
    else:
        slots, packing = layout
    logps = torch.log_softmax(
        tempered_logits(model, batch, slots, packing=packing, autocast=autocast), -1
    )
    logp = logps.gather(-1, batch.target_ids[slots, None])[:, 0]
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropy = entropy_of(logps)
    zeros = torch.zeros(batch.num_slots, dtype=torch.float32, device=batch.input_ids.device)
    top = top_of_model = None
    if batch.top_ids is not None:
        top_zeros = zeros.new_zeros(batch.top_ids.shape)
        top = top_zeros.index_copy(0, slots, logps.gather(-1, batch.top_ids[slots].long()))
        if trainer_top:
            best, ids = logps.detach().topk(top_zeros.shape[1], -1)
            all_ids = top_zeros.int().index_copy(0, slots, ids.int())
            top_of_model = all_ids, top_zeros.index_copy(0, slots, best)
    logp, entropy = zeros.index_copy(0, slots, logp), zeros.index_copy(0, slots, entropy)
    return Scored(logp, entropy, top, top_of_model)


def entropy_of(logps: Tensor) -> Tensor:
    """Return [n] nats: -sum p log p of each row of log-probabilities [n, vocabulary].

    A token that the head rules out (log p = -inf) adds 0 to the value and to the gradient, because
    p log p tends to 0.
    """
    entropy: Tensor = _Entropy.apply(logps)
    return entropy


class _Entropy(torch.autograd.Function):
    """Entropy with its own backward.

    Autograd's gradient of p log p is NaN at -inf, and it would keep two more tables of
    [n, vocabulary].
    """

    @staticmethod
    def forward(ctx: Any, logps: Tensor) -> Tensor:
        ctx.save_for_backward(logps)
        ruled_out = logps == -math.inf  # not `p == 0`: a NaN must stay NaN
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
    """Return [n, vocabulary] float32: logits of these slots over their sample's temperature."""
    device = batch.input_ids.device
    if packing is None:
        multiple = 1
        if is_invariant(model):
            multiple = TILE
        packing = Packing.of(batch.cu_seqlens, device, multiple=multiple)
    precision: AbstractContextManager = nullcontext()
    if autocast:
        precision = torch.autocast(device.type, autocast)
    with precision:
        logits = model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=slots,
            packing=packing,
        ).logits[0]
    return logits.float() / batch.temperature[batch.segment[slots], None]
