"""The check of every step under `numerics = on-policy`: engine and trainer gave the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.divergence.routing import routing_disagreement
from onepolicy.invariant.fingerprint import difference_reason
from onepolicy.types import Group, TokenBatch

HINT = "`onepolicy measure --numerics on-policy --recipe ...` names the operator"


def differing_slots(batch: TokenBatch) -> Tensor:
    """Return [T] bool: trainable slots whose two log-probabilities are not the same number.

    The batch must be scored.
    """
    assert batch.logp_old is not None
    return (batch.logp_old != batch.logp_rollout) & batch.trainable


def require_equal(
    batch: TokenBatch, groups: Sequence[Group] | None, fingerprint: str, *, when: str
) -> None:
    """Raise unless every log-probability and every expert is the same on both sides.

    Does nothing for a batch that was not scored.

    Args:
        batch: with `logp_old` and `logp_rollout`.
        groups: the groups that the batch was packed from, for names of problems.
        fingerprint: the learner's.
        when: the time of the check, for messages.

    Raises:
        TrainingError: something differs, or the two fingerprints allow it to.
    """
    if batch.logp_old is None:
        return
    reason = difference_reason(fingerprint, batch.fingerprints)
    if reason is not None:
        raise TrainingError(f"numerics: on-policy, {when}: {reason}")
    wrong = differing_slots(batch).nonzero()[:, 0]
    if len(wrong):
        slot = int(wrong[0])
        raise TrainingError(
            f"numerics: on-policy, {when}: {len(wrong)} of {batch.num_trainable} log-probabilities "
            f"differ, first {describe_slot(batch, slot, groups)}: "
            f"{float(batch.logp_rollout[slot]):.9g} in the engine, "
            f"{float(batch.logp_old[slot]):.9g} in the trainer; {HINT}"
        )
    if batch.routing is None or batch.routing_native is None or not batch.routing.valid.any():
        return
    found = routing_disagreement(batch.routing_native, batch.routing)
    if found.routers:
        layer = batch.routing.layers[int(found.per_layer.nonzero()[0, 0])]
        raise TrainingError(
            f"numerics: on-policy, {when}: {found.routers:.2%} of the routes have other experts "
            f"in the trainer than in the engine, first in layer {layer}; {HINT}"
        )


def describe_slot(batch: TokenBatch, slot: int, groups: Sequence[Group] | None) -> str:
    """Return the name of a slot: its problem, its sample within the group, its slot within that."""
    sample = int(batch.segment[slot])
    group = int(batch.group[sample])
    member = sample - int((batch.group == group).nonzero()[0, 0])
    slot_of_sample = slot - int(batch.cu_seqlens[sample])
    problem = ""
    if groups is not None:
        problem = f"problem {groups[group].problem_id}, "
    return f"{problem}sample {member} of its group, slot {slot_of_sample}"
