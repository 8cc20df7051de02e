"""`numerics = on-policy`: did engine and trainer give the same bits? Asked of every step; a difference is an error."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.invariant.fingerprint import difference_reason
from onepolicy.types import Group, TokenBatch

HINT = "`onepolicy measure --numerics on-policy --recipe ...` names the operator"


def differing_slots(batch: TokenBatch) -> Tensor:
    """[T] bool: trainable slots of a scored batch whose two log-probabilities are not the same number."""
    assert batch.logp_old is not None
    return (batch.logp_old != batch.logp_rollout) & batch.trainable


def require_equal(
    batch: TokenBatch, groups: Sequence[Group] | None, fingerprint: str, *, when: str
) -> None:
    """TrainingError unless every log-probability, and every expert, is the same number on both sides.

    batch: scored; without logp_old there is nothing to compare yet. groups: it was packed of, for names. fingerprint:
    of the learner.
    """
    if batch.logp_old is None:
        return
    if (why := difference_reason(fingerprint, batch.fingerprints)) is not None:
        raise TrainingError(f"numerics: on-policy, {when}: {why}")
    wrong = differing_slots(batch).nonzero()[:, 0]
    if len(wrong):
        slot = int(wrong[0])
        raise TrainingError(
            f"numerics: on-policy, {when}: {len(wrong)} of {batch.num_trainable} log-probabilities differ, "
            f"first {describe_slot(batch, slot, groups)}: {float(batch.logp_rollout[slot]):.9g} in the engine, "
            f"{float(batch.logp_old[slot]):.9g} in the trainer; {HINT}"
        )
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return
    found = routing_disagreement(batch.routing_native, batch.routing)
    if found.routers:
        layer = batch.routing.layers[int(found.per_layer.nonzero()[0, 0])]
        raise TrainingError(
            f"numerics: on-policy, {when}: {found.routers:.2%} of the routers choose other experts in the "
            f"trainer than in the engine, first in layer {layer}; {HINT}"
        )


def describe_slot(batch: TokenBatch, slot: int, groups: Sequence[Group] | None) -> str:
    """Which problem, which of its group's samples, which slot of it."""
    sample = int(batch.segment[slot])
    group = int(batch.group[sample])
    member = sample - int((batch.group == group).nonzero()[0, 0])
    own = slot - int(batch.cu_seqlens[sample])
    problem = "" if groups is None else f"problem {groups[group].problem_id}, "
    return f"{problem}sample {member} of its group, slot {own}"
