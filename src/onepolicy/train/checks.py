"""What a learner refuses: a batch no model of its kind can have sampled, routes that are not of its batch, models that
draw random numbers in a forward."""

from __future__ import annotations

import functools
import logging

from transformers import PreTrainedModel

from onepolicy.config import FromRollout, TrainingError, UsageError
from onepolicy.config.objective import MIN_AGREEMENT, ReplayConfig
from onepolicy.replay.alignment import check_alignment, check_captured
from onepolicy.replay.checks import MisalignedRoutesError
from onepolicy.types import MAX_LOGP, TokenBatch

LOG = logging.getLogger(__name__)


def check_batch(batch: TokenBatch, replay: ReplayConfig, vocab: int) -> None:
    """Before the first forward: nothing after this asks again, and on a GPU a wrong id ends the process.

    TrainingError for per-slot fields of different lengths, token ids outside 0..vocab-1, and log-probabilities of the
    rollout or outcomes that are none; UsageError for routes of another source than replay's.
    """
    per_slot = (
        "target_ids",
        "positions",
        "segment",
        "trainable",
        "version",
        "turn",
        "logp_rollout",
        "routing",
    )
    lengths = {
        name: len(getattr(batch, name)) for name in per_slot if getattr(batch, name) is not None
    }
    for name, length in (lengths | {"cu_seqlens": int(batch.cu_seqlens[-1])}).items():
        if length != batch.num_slots:
            raise TrainingError(
                f"batch: {name} has {length} slots, but input_ids has {batch.num_slots}; not trained on"
            )
    logp, outcome = batch.logp_rollout, batch.outcome[batch.segment]
    token = f"but the model's tokens are 0..{vocab - 1}"
    for name, values, right, why in (
        ("input_ids", batch.input_ids, (batch.input_ids >= 0) & (batch.input_ids < vocab), token),
        (
            "target_ids",
            batch.target_ids,
            (batch.target_ids >= 0) & (batch.target_ids < vocab),
            token,
        ),
        (
            "logp_rollout",
            logp,
            ~batch.trainable | (logp.isfinite() & (logp <= MAX_LOGP)),
            "no log-probability",
        ),
        ("outcome", outcome, outcome.isfinite(), "no number"),
    ):
        if not right.all():
            slot = int((~right).nonzero()[0, 0])
            sample = int(batch.segment[slot])
            where = f"slot {slot - int(batch.cu_seqlens[sample])} of sample {sample}, group {int(batch.group[sample])}"
            raise TrainingError(
                f"batch: {name} is {values[slot].tolist()} in {where}, {why}; not trained on"
            )
    _check_source(batch, replay)


def _check_source(batch: TokenBatch, replay: ReplayConfig) -> None:
    if not isinstance(replay, FromRollout) or batch.routing is None:
        return
    if batch.routing.reprefilled != (replay.source == "reprefill"):
        found = "a re-prefill" if batch.routing.reprefilled else "the engine"
        raise UsageError(
            f"replay.source: {replay.source}, but the batch's routes were recorded by {found}"
        )


def check_routes(scored: TokenBatch, replay: ReplayConfig, version: int) -> TokenBatch:
    """RoutingError if the rollout's routes are not those of this batch's tokens and weights, also where they are only
    measured; one warning for each router that has collapsed.

    version: of the weights that scored it; where older ones sampled, the error says how old they are.
    """
    native = scored.routing_native
    if scored.routing is None or native is None:
        return scored
    age = 0
    if scored.trainable.any():
        age = version - int(scored.version[scored.trainable].min())
    least = MIN_AGREEMENT
    if isinstance(replay, FromRollout):
        least = replay.min_agreement
    elif age > 0:
        least = 0.0  # routes of older weights that are only measured may differ
    try:
        collapsed = check_captured(scored.routing, native, scored.cu_seqlens, least=least)
        if isinstance(replay, FromRollout) and least > 0:
            check_alignment(scored.routing, native, scored.cu_seqlens, least=least)
    except MisalignedRoutesError as error:
        if age <= 0:
            asked = f"{error}. The least agreement is replay.min_agreement = {least}"
            raise MisalignedRoutesError(asked, layers_wrong=error.layers_wrong) from error
        old = (
            f"Or they are too old: the oldest tokens were sampled {age} updates ago, and every update changes what "
            "routers choose; then lower rollout.max_staleness or optim.lr, or replay.min_agreement"
        )
        raise MisalignedRoutesError(f"{error}. {old}", layers_wrong=error.layers_wrong) from error
    for layer, experts in collapsed.items():
        _warn_of_collapse(layer, tuple(sorted(experts)))
    return scored


@functools.cache
def _warn_of_collapse(layer: int, experts: tuple[int, ...]) -> None:
    LOG.warning(
        "layer %d: the router has collapsed: engine and trainer alike send every token of a sample to experts %s. "
        "These routes are right, but the policy may be lost: lower optim.lr or objective.entropy_coef and go on from "
        "an earlier checkpoint",
        layer,
        list(experts),
    )


RANDOM = (
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
    "attn_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
    "input_jitter_noise",
    "moe_jitter_eps",
)


def refuse_randomness(model: PreTrainedModel) -> None:
    """Train mode must compute what eval mode does, or the trainer would not be the policy that is measured."""
    config = model.config.get_text_config()
    for name in RANDOM:
        if getattr(config, name, 0):
            raise UsageError(
                f"model.path: {name}={getattr(config, name)} in the config; checkpointing activations needs 0"
            )
