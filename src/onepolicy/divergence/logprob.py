"""Mismatch between the log-probabilities that two engines give to the same sampled tokens."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.divergence.compare import Mismatch, compare_tokens
from onepolicy.layout import Layout, flatten_arguments, slot_index
from onepolicy.nonfinite import LeftOut, Nonfinite, apply_rule, refuse_probabilities


def mismatch(
    logp_old: Layout,  # [T] float32, trainer; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, the sampled tokens; the other slots may hold anything
    *,
    segment: Layout | None = None,  # int64, sample of each slot; None: [T] is one sample
    nonfinite: Nonfinite = "skip",  # leave out slots whose values are not finite, or raise
) -> Mismatch:
    """Compare both engines on the masked-in slots, in float64.

    Raises UsageError if no slot is left, if probabilities stand for their logarithms, or if
    a value is not finite and `nonfinite` is "raise".
    """
    given = {"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}
    flat = flatten_arguments("mismatch", {**given, "segment": segment})
    return compare_tokens(*_masked(flat, mask, nonfinite))


def _masked(
    flat: dict[str, Tensor | None], like: Layout, nonfinite: Nonfinite
) -> tuple[Tensor, Tensor, Tensor, LeftOut]:
    """Return both sides [n] float64 and samples [n] of the slots left, and the others' count."""
    old, rollout, mask, segment = flat.values()
    assert old is not None
    assert rollout is not None
    assert mask is not None
    sides = {"logp_old": old, "logp_rollout": rollout}
    place = functools.partial(slot_index, like=like)
    kept, left = apply_rule("mismatch", nonfinite, mask, sides, place=place)
    if not left.tokens:
        raise UsageError(
            f"mismatch: the mask selects none of {mask.numel()} slots; there is nothing to compare"
        )
    if left.count == left.tokens:
        raise UsageError(f"mismatch: {left}; there is nothing to compare")
    refuse_probabilities("mismatch", kept, sides, place=place)
    if segment is None:
        segment = torch.zeros_like(kept, dtype=torch.int64)
    return old.detach()[kept].double(), rollout.detach()[kept].double(), segment[kept], left
