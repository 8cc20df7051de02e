"""Checks of the trainer: batches and replayed routes."""

from __future__ import annotations

from torch import Tensor

from onepolicy.config import RolloutReplay, TrainingError
from onepolicy.config.replay import MIN_AGREEMENT, ReplayConfig
from onepolicy.divergence.routing import router_differences
from onepolicy.replay.checks import MisalignedRoutesError
from onepolicy.replay.windows import check_captured, check_samples
from onepolicy.support.checks import check_certain, check_supports
from onepolicy.support.trace import SupportTrace
from onepolicy.train.route_words import misaligned_hint, warn_of_collapse
from onepolicy.types import TokenBatch


def check_batch(batch: TokenBatch, vocab: int, *, narrows: bool = False) -> None:
    """Check a step's batch against the model, before its first forward.

    Everything else that a batch holds is right by the types that it is made of: a Sample has a
    finite log-probability and a route for each of its slots. But nothing else knows the model's
    vocabulary, and on a GPU a wrong token id ends the process. Raises TrainingError for token ids
    outside 0..vocab-1, for an outcome that is no number, and for a sampled token that is not in its
    support or lacks one. narrows: the run samples with top_p, top_k or min_p.
    """
    outside = f"but the model's tokens are 0..{vocab - 1}"
    for name in ("input_ids", "target_ids"):
        ids = getattr(batch, name)
        _check_slots(batch, name, ids, (ids >= 0) & (ids < vocab), outside)
    outcome = batch.outcome[batch.segment]
    _check_slots(batch, "outcome", outcome, outcome.isfinite(), "no number")
    support = batch.support
    if support is None and narrows:
        support = SupportTrace.missing(batch.num_slots)
    if support is not None:
        check_supports(support, batch.target_ids, batch.trainable, name="batch")
        check_certain(support, batch.logp_rollout, batch.trainable, name="batch")
        support.check_values(vocab)


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


def check_routes(
    scored: TokenBatch,
    replay: ReplayConfig,
    version: int,
    *,
    pressed: bool = False,
    moved: int = 0,
) -> TokenBatch:
    """Check that the batch's routes are those of its tokens and weights.

    Return it with `routers_differing`. Routes that are only measured are checked too. Each router
    that has collapsed gives one warning. version: of the weights that scored the batch. pressed:
    rollout.pressure makes the engine choose otherwise, so routes that are only measured are not
    refused. moved: optimiser steps that the weights have made since `version`. Raises RoutingError;
    if older weights sampled the batch, the error gives their age.
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
            check_samples(
                scored.routing, native, scored.cu_seqlens, least=least, differing=differing
            )
    except MisalignedRoutesError as error:
        hint = misaligned_hint(age, least, moved)
        raise MisalignedRoutesError(f"{error}. {hint}", layers_wrong=error.layers_wrong) from error
    for layer, experts in collapsed.items():
        warn_of_collapse(layer, tuple(sorted(experts)))
    return scored.replace(routers_differing=differing)
