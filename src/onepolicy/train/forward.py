"""The forward of one packed micro-batch: log-probabilities and entropy of its trainable slots.

A batch with `support` was sampled by top-k, top-p or min-p. Its log-probabilities are those of the
softmax over the tokens that the engine kept, as the engine's are.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.chunk_size import MARK
from onepolicy.models.logits_chunks import map_logits
from onepolicy.models.packed_attention import Packing
from onepolicy.support.checks import displaced_mass
from onepolicy.support.score import support_logits, support_scores
from onepolicy.types import TokenBatch

# Text for the numerics contract, which must be equal to the engine's.
LOGP = "log_softmax of float32 logits / temperature, then gather"


def logits_chunk(model: PreTrainedModel) -> int:
    """Return the slots of a chunk of this model's logits, 0 for no chunks."""
    return getattr(model, MARK, 0)


class Scored(NamedTuple):
    """Scores of a micro-batch's slots."""

    logp: Tensor  # [T] float32, 0 where not trainable; carries the graph
    # [T] float32 over the whole vocabulary, 0 where not trainable; carries the graph if asked for
    entropy: Tensor
    entropy_support: Tensor | None = None  # [T] float32, over batch.support, if it has one
    logp_vocabulary: Tensor | None = None  # [T] float32, over all tokens, if it has one
    displaced: Tensor | None = None  # [T] float32, of `displaced_mass`, if asked for
    # [T, k] float32, log-probabilities of batch.top_ids, as `logp`; None if the batch has none
    top: Tensor | None = None
    # [T, k] int32, float32: the model's likeliest tokens and their log-probabilities, if asked for
    trainer_top: tuple[Tensor, Tensor] | None = None
    row_of: Tensor | None = None  # [T] int64, row that computed each slot; None: a row each


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
    displaced: bool = False,
) -> Scored:
    """Score a batch that is on the model's device.

    Only trainable slots reach the vocabulary projection. Log-probabilities are
    `log_softmax(logits / temperature)` in float32, then gather, as in the rollout engine.
    entropy_graph: the entropy carries the graph. trainer_top: fill `Scored.trainer_top` if the
    batch has `top_ids`. displaced: fill `Scored.displaced` if it has `support`.
    """
    if layout is None:
        slots, packing = batch.trainable.nonzero()[:, 0], None
    else:
        slots, packing = layout
    options = {"entropy_graph": entropy_graph, "trainer_top": trainer_top}
    chunk, invariant = logits_chunk(model), is_invariant(model)
    over_support = partial(
        _score_over_support,
        invariant=invariant,
        displaced=displaced,
        entropy_graph=entropy_graph,
        trainer_top=trainer_top,
    )
    if not chunk or len(slots) <= chunk or invariant:
        tempered = tempered_logits(model, batch, slots, packing=packing, autocast=autocast)
        if batch.support is not None:
            return _scatter(over_support(tempered, batch, slots), batch, slots)
        logps = torch.log_softmax(tempered, -1)
        del tempered
        return _scatter(_score_rows(logps, batch, slots, **options), batch, slots)

    def score_chunk(logits: Tensor, rows: slice) -> tuple[Tensor, ...]:
        own = slots[rows]
        tempered = _tempered(logits, batch, own)
        del logits  # one table less at a time
        if batch.support is not None:
            return over_support(tempered, batch, own)
        logps = torch.log_softmax(tempered, -1)
        del tempered
        return _score_rows(logps, batch, own, **options)

    with _precision(batch, autocast):
        arguments = _model_arguments(model, batch, packing)
        rows = slots if batch.shared is None else batch.shared.row_of[slots]
        scores = map_logits(model, rows, score_chunk, chunk, **arguments)
    return _scatter(scores, batch, slots)


def _score_rows(
    logps: Tensor,  # [m, V] float32
    batch: TokenBatch,
    slots: Tensor,  # [m] int64, of these rows
    *,
    entropy_graph: bool,
    trainer_top: bool,
) -> tuple[Tensor, ...]:
    """Return the fields of Scored for these slots, m rows each, those of trainer_top apart."""
    logp = logps.gather(-1, batch.target_ids[slots, None])[:, 0]
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        entropy = entropy_of(logps)
    if batch.top_ids is None:
        return logp, entropy
    top = logps.gather(-1, batch.top_ids[slots].long())
    if not trainer_top:
        return logp, entropy, top
    best, ids = logps.detach().topk(batch.top_ids.shape[1], -1)
    return logp, entropy, top, ids.int(), best


def _score_over_support(
    tempered: Tensor,  # [m, V] float32
    batch: TokenBatch,
    slots: Tensor,  # [m] int64, of these rows
    *,
    invariant: bool,
    displaced: bool,
    entropy_graph: bool,
    trainer_top: bool,
) -> tuple[Tensor, ...]:
    """Return the fields of Scored for these slots as `_score_rows` does, over their sets.

    With invariant operators the softmax is over the engine's own table, which has its bits.
    """
    assert batch.support is not None
    support, targets = batch.support.at(slots), batch.target_ids[slots]
    over_set = None
    if invariant or batch.top_ids is not None:
        over_set = torch.log_softmax(support_logits(tempered, support), -1)
    scores = support_scores(tempered, targets, support)
    logp = scores.logp
    if over_set is not None:
        logp = over_set.gather(-1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
        logps = torch.log_softmax(tempered, -1)
        entropy = entropy_of(logps)
    of_vocabulary = logps.detach().gather(-1, targets[:, None])[:, 0]
    apart = torch.full_like(entropy, math.nan)
    if displaced:
        apart = displaced_mass(logps.detach(), support)
    found = logp, entropy, scores.entropy.detach(), of_vocabulary, apart
    if batch.top_ids is None or over_set is None:
        return found
    top = over_set.gather(-1, batch.top_ids[slots].long())
    if not trainer_top:
        return *found, top
    best, ids = over_set.detach().topk(batch.top_ids.shape[1], -1)
    return *found, top, ids.int(), best


def _scatter(scores: tuple[Tensor, ...], batch: TokenBatch, slots: Tensor) -> Scored:
    """Return the scores of `_score_rows` at their slots, 0 elsewhere."""
    all_slots = []
    for rows in scores:
        zeros = rows.new_zeros(batch.num_slots, *rows.shape[1:])
        all_slots.append(zeros.index_copy(0, slots, rows))
    logp, entropy, *tops = all_slots
    entropy_support = logp_vocabulary = displaced = None
    if batch.support is not None:
        entropy_support, logp_vocabulary, displaced, *tops = tops
    top = top_of_model = None
    if tops:
        top = tops[0]
    if len(tops) > 1:
        top_of_model = tops[1], tops[2]
    row_of = None if batch.shared is None else batch.shared.row_of
    return Scored(
        logp, entropy, entropy_support, logp_vocabulary, displaced, top, top_of_model, row_of
    )


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
    with _precision(batch, autocast):
        arguments = _model_arguments(model, batch, packing)
        rows = slots if batch.shared is None else batch.shared.row_of[slots]
        logits = model(**arguments, logits_to_keep=rows).logits[0]
    return _tempered(logits, batch, slots)


def _tempered(logits: Tensor, batch: TokenBatch, slots: Tensor) -> Tensor:
    return logits.float() / batch.temperature[batch.segment[slots], None]


def _precision(batch: TokenBatch, autocast: torch.dtype | None) -> AbstractContextManager:
    if autocast:
        return torch.autocast(batch.input_ids.device.type, autocast)
    return nullcontext()


def _model_arguments(
    model: PreTrainedModel, batch: TokenBatch, packing: Packing | None
) -> dict[str, Any]:
    """Return the arguments of a forward over the whole batch. packing: None means the batch's."""
    ids, positions = batch.input_ids, batch.positions
    if batch.shared is not None:
        slots, packing = batch.shared.slots, batch.shared.packing
        ids, positions = ids[slots], positions[slots]
    elif packing is None:
        multiple = 1
        if is_invariant(model):
            multiple = TILE
        packing = BucketedPacking.of(batch.cu_seqlens, batch.input_ids.device, multiple=multiple)
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "packing": packing,
    }
