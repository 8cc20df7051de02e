"""Checks of the trainer: batches and replayed routes."""

from __future__ import annotations

import functools
import logging

from torch import Tensor

from onepolicy.config import RolloutReplay, TrainingError, UsageError
from onepolicy.config.replay import MIN_AGREEMENT, ReplayConfig
from onepolicy.divergence.routing import router_differences
from onepolicy.replay.alignment import check_alignment, check_captured
from onepolicy.replay.checks import MisalignedRoutesError
from onepolicy.types import MAX_LOGP, TokenBatch

LOG = logging.getLogger(__name__)

PER_SLOT = (
    "target_ids",
    "positions",
    "segment",
    "trainable",
    "version",
    "turn",
    "logp_rollout",
    "routing",
)
"""Fields of a batch that must have a row per slot."""


def check_batch(batch: TokenBatch, replay: ReplayConfig, vocab: int) -> None:
    """Check a batch before its first forward.

    No later code checks these values, and on a GPU a wrong token id ends the process. Raises
    TrainingError for per-slot fields of different lengths, for token ids outside 0..vocab-1, and
    for rollout log-probabilities or outcomes that are not valid numbers. Raises UsageError if the
    routes come from another source than replay.source.
    """
    _check_lengths(batch)
    outside = f"but the model's tokens are 0..{vocab - 1}"
    for name in ("input_ids", "target_ids"):
        ids = getattr(batch, name)
        _check_slots(batch, name, ids, (ids >= 0) & (ids < vocab), outside)
    logp = batch.logp_rollout
    valid_logp = ~batch.trainable | (logp.isfinite() & (logp <= MAX_LOGP))
    _check_slots(batch, "logp_rollout", logp, valid_logp, "no log-probability")
    outcome = batch.outcome[batch.segment]
    _check_slots(batch, "outcome", outcome, outcome.isfinite(), "no number")
    _check_source(batch, replay)


def _check_lengths(batch: TokenBatch) -> None:
    fields = {name: getattr(batch, name) for name in PER_SLOT}
    lengths = {name: len(field) for name, field in fields.items() if field is not None}
    lengths["cu_seqlens"] = int(batch.cu_seqlens[-1])
    for name, length in lengths.items():
        if length != batch.num_slots:
            raise TrainingError(
                f"batch: {name} has {length} slots, but input_ids has {batch.num_slots}; "
                "the batch was not trained on"
            )


def _check_slots(
    batch: TokenBatch,
    name: str,
    values: Tensor,  # [T]
    valid: Tensor,  # [T] bool
    problem: str,
) -> None:
    """Raise TrainingError for the first slot whose value is not valid."""
    if valid.all():
        return
    slot = int((~valid).nonzero()[0, 0])
    sample = int(batch.segment[slot])
    slot_in_sample = slot - int(batch.cu_seqlens[sample])
    raise TrainingError(
        f"batch: {name} is {values[slot].tolist()} in slot {slot_in_sample} of sample {sample}, "
        f"group {int(batch.group[sample])}, {problem}; the batch was not trained on"
    )


def _check_source(batch: TokenBatch, replay: ReplayConfig) -> None:
    if not isinstance(replay, RolloutReplay) or batch.routing is None:
        return
    if batch.routing.reprefilled == (replay.source == "reprefill"):
        return
    recorded_by = "the engine"
    if batch.routing.reprefilled:
        recorded_by = "a re-prefill"
    raise UsageError(
        f"replay.source: {replay.source}, but the batch's routes were recorded by {recorded_by}"
    )


def check_routes(
    scored: TokenBatch, replay: ReplayConfig, version: int, *, pressed: bool = False
) -> TokenBatch:
    """Check that the batch's routes are those of its tokens and weights.

    Return it with `routers_differing`. Routes that are only measured are checked too. Each router
    that has collapsed gives one warning. version: of the weights that scored the batch. pressed:
    rollout.pressure makes the engine choose otherwise, so routes that are only measured are not
    refused. Raises RoutingError; if older weights sampled the batch, the error gives their age.
    """
    native = scored.routing_native
    if scored.routing is None or native is None:
        return scored
    age = 0
    if scored.trainable.any():
        age = version - int(scored.version[scored.trainable].min())
    least = MIN_AGREEMENT
    if isinstance(replay, RolloutReplay):
        least = replay.min_agreement
    elif age > 0 or pressed:
        least = 0.0  # other weights may have chosen other routes, and these are only measured
    try:
        collapsed = check_captured(scored.routing, native, scored.cu_seqlens, least=least)
        differing = router_differences(scored.routing, native)
        if isinstance(replay, RolloutReplay) and least > 0:
            check_alignment(
                scored.routing, native, scored.cu_seqlens, least=least, differing=differing
            )
    except MisalignedRoutesError as error:
        hint = _misaligned_hint(age, least)
        raise MisalignedRoutesError(f"{error}. {hint}", layers_wrong=error.layers_wrong) from error
    for layer, experts in collapsed.items():
        _warn_of_collapse(layer, tuple(sorted(experts)))
    return scored.replace(routers_differing=differing)


def _misaligned_hint(age: int, least: float) -> str:
    if age <= 0:
        return f"The least agreement is replay.min_agreement = {least}"
    return (
        f"Or they are too old: the oldest tokens were sampled {age} updates ago, and every update "
        "changes the routers' choices; then lower rollout.max_staleness or optim.lr, or "
        "replay.min_agreement"
    )


@functools.cache
def _warn_of_collapse(layer: int, experts: tuple[int, ...]) -> None:
    LOG.warning(
        "layer %d: the router has collapsed: engine and trainer both send every token of a sample "
        "to experts %s. These routes are right, but the policy may be damaged beyond repair. Lower "
        "optim.lr or objective.entropy_coef and continue from an earlier checkpoint",
        layer,
        list(experts),
    )
