"""`onepolicy measure --top N`: distances between the engines' distributions over N tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.divergence.breakdown import places
from onepolicy.divergence.distribution import Distances, distances
from onepolicy.interfaces import EngineCaps
from onepolicy.measure.breakdowns import BEFORE, WORST, text_of
from onepolicy.types import TokenBatch

EDGES = tuple(10 ** (tenth / 10) for tenth in range(-60, 1))
SHOWN = 5  # likeliest tokens of each engine at a worst position


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token with its probability in both engines."""

    token: str
    p_rollout: float | None  # None: the engine did not return it
    p_trainer: float


@dataclass(frozen=True, slots=True)
class WorstPosition:
    """A slot where the distributions are far apart, and the text before it."""

    sequence: int
    place: int  # in its response, from 0
    before: str
    sampled: str
    tv_low: float
    tv_high: float
    candidates: list[Candidate]  # the likeliest of either engine


def check_top(top: int, caps: EngineCaps) -> None:
    """Raise UsageError if the engine does not return the `top` likeliest tokens."""
    if 1 <= top <= caps.top_logprobs:
        return
    most = "none"
    if caps.top_logprobs:
        most = f"1 to {caps.top_logprobs}"
    raise UsageError(
        f"--top: log-probabilities of the {top} likeliest tokens were asked for; this engine "
        f"returns {most}"
    )


def without_top(batch: TokenBatch) -> TokenBatch:
    """Return the batch without the likeliest tokens, which scorings of one token do not need."""
    return batch.replace(
        top_ids=None,
        top_logp_rollout=None,
        top_logp_old=None,
        trainer_top_ids=None,
        trainer_top_logp=None,
    )


def compare(
    native: TokenBatch, replayed: TokenBatch | None, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the comparison of two scorings of a batch with top_ids, as JSON has it."""
    both = {"without_replay": distances_of(native)}
    if replayed is not None:
        both["with_replay"] = distances_of(replayed)
    return {
        "top": both["without_replay"].top,
        "metrics": {name: each.metrics() for name, each in both.items()},
        "edges": list(EDGES),
        "above": {
            name: dict(zip(("low", "high"), each.above(EDGES), strict=True))
            for name, each in both.items()
        },
        "worst": [
            dataclasses.asdict(each)
            for each in worst_positions(native, both["without_replay"], tokenizer)
        ],
    }


def distances_of(batch: TokenBatch) -> Distances:
    """Return the distances at the trainable slots of a scored batch with top_ids."""
    fields = [
        batch.top_ids,
        batch.top_logp_rollout,
        batch.top_logp_old,
        batch.trainer_top_ids,
        batch.trainer_top_logp,
    ]
    return distances(*(field[batch.trainable] for field in fields if field is not None))


def worst_positions(
    batch: TokenBatch, found: Distances, tokenizer: PreTrainedTokenizerBase
) -> list[WorstPosition]:
    """Return the slots with the largest lower bound of the total variation.

    `found` is `distances_of(batch)`.
    """
    slots, place = batch.trainable.nonzero()[:, 0], places(batch.trainable, batch.segment)
    out = []
    for i in found.tv_low.argsort(descending=True)[:WORST].tolist():
        slot, sequence = int(slots[i]), int(batch.segment[slots[i]])
        start = max(int(batch.cu_seqlens[sequence]), slot + 1 - BEFORE)
        out.append(
            WorstPosition(
                sequence,
                int(place[i]),
                text_of(tokenizer, batch.input_ids[start : slot + 1].tolist()),
                _token(tokenizer, int(batch.target_ids[slot])),
                float(found.tv_low[i]),
                float(found.tv_high[i]),
                _candidates(batch, slot, tokenizer),
            )
        )
    return out


def _candidates(
    batch: TokenBatch, slot: int, tokenizer: PreTrainedTokenizerBase
) -> list[Candidate]:
    def pairs(ids: Tensor | None, logp: Tensor | None) -> dict[int, float]:
        assert ids is not None
        assert logp is not None
        return dict(zip(ids[slot].tolist(), logp[slot].exp().tolist(), strict=True))

    rollout = pairs(batch.top_ids, batch.top_logp_rollout)
    trainer_top = pairs(batch.trainer_top_ids, batch.trainer_top_logp)
    trainer = pairs(batch.top_ids, batch.top_logp_old) | trainer_top
    shown = dict.fromkeys([*list(rollout)[:SHOWN], *list(trainer_top)[:SHOWN]])
    return [Candidate(_token(tokenizer, t), rollout.get(t), trainer[t]) for t in shown]


def _token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return text_of(tokenizer, [token]) or f"token {token}"  # the tokenizer has no text for it
