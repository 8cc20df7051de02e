"""Checks of supports: the token is in its own, whose tokens are the likeliest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.errors import TrainingError
from onepolicy.support.trace import SupportTrace

MOST_DISPLACED = 0.5
"""Most mean probability of tokens that a set leaves out though they are likelier than one in it.

Top-k, top-p and min-p keep the likeliest tokens, so right sets have none but at their border, where
engine and trainer round differently.
"""
LEAST_SEEN = 16
"""Compared slots of a sample, or of a batch, from which on their mean decides: one answer of one
token may have changed between two versions of the weights."""
COMPARED = 256
"""Slots of a chunk of logits that are compared, in equal steps."""
CLEAR_SHIFT = 0.99
"""Share of the neighbours' tokens in the sets from which on a shift is named as the cause."""
CERTAIN = -1e-3
"""Least log-probability of a set's only token: it was drawn from nothing else."""


class SupportError(TrainingError):
    """Supports that are missing, or that are not those of the tokens."""


class MissingSupportError(SupportError):
    """Sampled tokens without a support."""


def check_supports(
    support: SupportTrace, tokens: Tensor, mask: Tensor | None = None, *, name: str
) -> None:
    """Raise SupportError unless every slot has a set, and its own token in it.

    It is a MissingSupportError if a set is missing.

    Nothing is filled in: a token scored over the whole vocabulary has a wrong ratio.

    Args:
        support: T slots.
        tokens: [T] integer, the sampled ones.
        mask: [T] bool, slots that need a set. None: all.
        name: of the batch or sample, for the message.
    """
    needed = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        needed = mask
    missing = needed & ~support.captured
    if missing.any():
        raise MissingSupportError(
            f"{name}: {int(missing.sum())} of {int(needed.sum())} sampled tokens have no support, "
            f"the first in slot {int(missing.nonzero()[0, 0])}. Without the tokens that it was "
            "drawn from, a token's ratio would be wrong. Let the engine return them for every "
            "token, or leave these samples out"
        )
    outside = needed & ~support.contains(tokens)
    if outside.any():
        slot = int(outside.nonzero()[0, 0])
        count = f"{int(outside.sum())} of {int(needed.sum())}"
        raise SupportError(
            f"{name}: {count} sampled tokens are not in their own support, the first is token "
            f"{int(tokens[slot])} in slot {slot}, whose set has {int(support.sizes[slot])} other "
            f"tokens{_whose(support, tokens, needed)}"
        )


def _whose(support: SupportTrace, tokens: Tensor, needed: Tensor) -> str:
    """Return the end of the message: whose sets these are, if a shift explains it."""
    shares = {}
    for shift in (-1, 1):
        has_neighbour = needed & needed.roll(shift)  # not the first or last of a sample
        has_neighbour[min(shift, 0)] = False  # the end whose neighbour roll() takes from the other
        if has_neighbour.any():
            found = support.contains(tokens.roll(shift))[has_neighbour]
            shares[shift] = float(found.float().mean())
    shift = max(shares, key=shares.__getitem__, default=0)
    if shares.get(shift, 0.0) < CLEAR_SHIFT:
        return (
            ". It belongs to another request or token, or the engine's list was cut (more tokens "
            "than it returns tie at top_k)"
        )
    own = float(support.contains(tokens)[needed].float().mean())
    where = "before" if shift == 1 else "after"
    return (
        f". The sets are those of the token {where}: {shares[shift]:.1%} of these are in them, "
        f"{own:.1%} of their own. Shift the sets by one slot"
    )


def check_certain(support: SupportTrace, logp_rollout: Tensor, mask: Tensor, *, name: str) -> None:
    """Raise SupportError for a set of one token that the engine was not certain of.

    logp_rollout: [T] float32. mask: [T] bool, sampled tokens.
    """
    wrong = mask & (support.sizes == 1) & (logp_rollout < CERTAIN)
    if wrong.any():
        slot = int(wrong.nonzero()[0, 0])
        raise SupportError(
            f"{name}: {int(wrong.sum())} supports have their sampled token alone, but the engine "
            f"gave it a log-probability of {float(logp_rollout[slot]):.4g}, the first in slot "
            f"{slot}. The other tokens of the set were lost, or the values are of the whole "
            "vocabulary (vLLM: logprobs_mode)"
        )


def displaced_mass(logps: Tensor, support: SupportTrace) -> Tensor:
    """Return [m] float32: probability of tokens that a set leaves out and should not.

    They are likelier than the least likely token of the set. At most COMPARED slots are looked at,
    NaN for the rest. logps: [m, V] float32, of the trainer over the whole vocabulary.
    """
    found = torch.full((len(logps),), torch.nan, device=logps.device)
    if not len(logps):
        return found
    seen = torch.arange(0, len(logps), -(-len(logps) // COMPARED), device=logps.device)
    chosen, rows = support.at(seen), logps[seen]
    of_ids = rows[chosen.slot_of, chosen.ids.long()]
    least = torch.segment_reduce(of_ids, "min", lengths=chosen.sizes, unsafe=True)
    above = rows.exp().masked_fill_(rows <= least[:, None], 0.0).sum(-1)
    own = of_ids.exp().masked_fill(of_ids <= least[chosen.slot_of], 0.0)
    inside = torch.segment_reduce(own, "sum", lengths=chosen.sizes, unsafe=True)
    return found.index_copy(0, seen, (above - inside).clamp(min=0.0))


def check_displaced(
    displaced: Tensor,  # [T] float32 of `displaced_mass`
    segment: Tensor,  # [T] int64, sample of each slot
    mask: Tensor,  # [T] bool, sampled tokens
    versions: Tensor,  # [T] integer, of the weights that sampled each token
    *,
    now: int,
    samples: Sequence[int] | None = None,
    moved: int = 0,
) -> None:
    """Raise SupportError if sets of a sample, or of the batch, are not of the likeliest tokens.

    now: version of the trainer's weights. samples: the number of each sample in the error, if these
    are a part of a minibatch. moved: minibatches of the step that were trained on before.
    """
    seen = mask & ~displaced.isnan()
    values, segment = displaced[seen], segment[seen]
    if not len(values):
        return
    zeros = values.new_zeros(int(segment.max()) + 1)
    count = zeros.index_add(0, segment, torch.ones_like(values))
    mean = zeros.index_add(0, segment, values) / count
    wrong = ((mean > MOST_DISPLACED) & (count >= LEAST_SEEN)).nonzero()[:, 0].tolist()
    if len(values) >= LEAST_SEEN and float(values.mean()) > MOST_DISPLACED:
        wrong = sorted(set(segment.tolist()))
    if wrong:
        first, trained, stale = wrong[0], "The batch was not trained on", ""
        if samples is not None:
            first = samples[first]
        if moved:
            trained = f"Samples are counted within minibatch {moved + 1}; those before it were used"
        age = now - int(versions[mask].min())
        if age > 0:
            stale = f" Or they are too old: the oldest tokens were sampled {age} updates ago."
        raise SupportError(
            f"batch: the supports of {len(wrong)} samples, the first is sample {first}, leave "
            f"out tokens with {float(mean[wrong[0]]):.0%} of the trainer's probability that are "
            "likelier than ones they have. They are sets of other tokens, other requests or other "
            f"weights.{stale} {trained}"
        )
