"""Checks of supports: the token is in its own, whose tokens are the likeliest."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.errors import TrainingError
from onepolicy.support.trace import SupportTrace

LEAST_OVERLAP = 0.5
"""Least mean overlap of a sample's sets with the trainer's own sets of the same sizes.

Right sets differ at their border only, where probabilities are small: 0.98 and more with a router
or a weight rounded to 4 bits. Sets of other slots have about the share of two unrelated sets.
"""

MOST_SEEN = 64
"""Slots of a chunk of logits, of those with unlikely sets, whose sets are compared."""
CLEAR_SHIFT = 0.99
"""Share of the neighbours' tokens in the sets from which on a shift is named as the cause."""


class SupportError(TrainingError):
    """Supports that are missing, or that are not those of the tokens."""


def check_supports(
    support: SupportTrace, tokens: Tensor, mask: Tensor | None = None, *, name: str
) -> None:
    """Raise SupportError unless every slot has a set, and its own token in it.

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
        raise SupportError(
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
        has_neighbour = needed.clone()
        has_neighbour[min(shift, 0)] = False  # the end whose neighbour roll() takes from the other
        if has_neighbour.any():
            found = support.contains(tokens.roll(shift))[has_neighbour]
            shares[shift] = float(found.float().mean())
    shift = max(shares, key=shares.__getitem__, default=0)
    if shares.get(shift, 0.0) < CLEAR_SHIFT:
        return ". It belongs to another request, to another token, or to a row before sampling"
    own = float(support.contains(tokens)[needed].float().mean())
    where = "before" if shift == 1 else "after"
    return (
        f". The sets are those of the token {where}: {shares[shift]:.1%} of these are in them, "
        f"{own:.1%} of their own. Shift the sets by one slot"
    )


def overlap_of(logps: Tensor, support: SupportTrace) -> Tensor:
    """Return [m]: probability of each set over that of the trainer's likeliest tokens, as many.

    Top-k, top-p and min-p all keep the likeliest tokens, so a right set has 1 but for its border,
    whatever their values were. A set with half of the probability gets 1 unseen, and at most
    MOST_SEEN of the others are compared: NaN for the rest. logps: [m, V] float32, of the whole
    vocabulary.
    """
    of_ids = logps[support.slot_of, support.ids.long()].exp()
    mass = torch.segment_reduce(of_ids, "sum", lengths=support.sizes, unsafe=True)
    found = torch.where(mass < LEAST_OVERLAP, torch.nan, 1.0)
    seen = found.isnan().nonzero()[:, 0]
    if not len(seen):
        return found
    seen = seen[:: -(-len(seen) // MOST_SEEN)]
    sizes = support.sizes[seen]
    likeliest = logps[seen].topk(int(sizes.max()), -1).values.exp().cumsum(-1)
    best = likeliest.gather(-1, (sizes - 1).clamp(min=0)[:, None])[:, 0]
    return found.index_copy(0, seen, mass[seen] / best)


def check_overlap(overlap: Tensor, segment: Tensor, slots: Tensor) -> None:
    """Raise SupportError for a sample whose sets are not those of the trainer's distribution.

    overlap: [T] float32 of `overlap_of`. segment: [T] int64, sample of each slot. slots: [n] int64,
    trainable ones.
    """
    values, samples = overlap[slots], segment[slots]
    seen = ~values.isnan()
    values, samples = values[seen], samples[seen]
    zeros = torch.zeros(int(segment[-1]) + 1)
    count = zeros.index_add(0, samples, torch.ones_like(values))
    mean = zeros.index_add(0, samples, values) / count
    wrong = (mean < LEAST_OVERLAP).nonzero()[:, 0].tolist()
    if wrong:
        raise SupportError(
            f"batch: the supports of {len(wrong)} samples, the first is sample {wrong[0]}, have "
            f"{float(mean[wrong[0]]):.0%} of the probability that the trainer's likeliest tokens, "
            f"as many, have; right ones have {LEAST_OVERLAP:.0%} or more. They are sets of other "
            "tokens, other requests or other weights. The batch was not trained on"
        )
