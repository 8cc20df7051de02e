"""What a learner refuses: routes that are not of its batch, models that draw random numbers in a forward."""

from __future__ import annotations

from transformers import PreTrainedModel

from onepolicy.config import FromRollout, UsageError
from onepolicy.config.objective import ReplayConfig
from onepolicy.replay.alignment import check_alignment
from onepolicy.types import TokenBatch


def check_source(batch: TokenBatch, replay: ReplayConfig) -> None:
    if not isinstance(replay, FromRollout) or batch.routing is None:
        return
    if batch.routing.reprefilled != (replay.source == "reprefill"):
        found = "a re-prefill" if batch.routing.reprefilled else "the engine"
        raise UsageError(f"replay.source: {replay.source}, but the batch's routes were recorded by {found}")


def check_routes(scored: TokenBatch, replay: ReplayConfig) -> TokenBatch:
    """RoutingError if the routes replayed in this batch are not those of its tokens and weights."""
    native = scored.routing_native
    if isinstance(replay, FromRollout) and replay.min_agreement > 0 and native is not None:
        assert scored.routing is not None
        check_alignment(scored.routing, native, scored.cu_seqlens, least=replay.min_agreement)
    return scored


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
