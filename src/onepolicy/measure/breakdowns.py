"""Breakdowns of a scored batch, and its worst tokens with their text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from onepolicy.divergence.breakdown import (
    CLASSES,
    ENTROPIES,
    PLACES,
    PROBABILITIES,
    TURNS,
    Parts,
    Row,
    WorstToken,
    echoed,
    inside_calls,
    places,
    turn_bins,
    turn_name,
)
from onepolicy.divergence.breakdown import token_class as class_of
from onepolicy.train.rescore import logp_of
from onepolicy.types import TokenBatch

WORST = 20
BEFORE, AFTER = 24, 8  # tokens shown around a worst one


def breakdowns_of(
    batch: TokenBatch, tokenizer: PreTrainedTokenizerBase, stop: Sequence[int]
) -> dict[str, list[Row]]:
    """Return the breakdowns of a scored batch by name.

    There is one by turn only if some sample has several turns.
    """
    mask = batch.trainable
    assert batch.entropy is not None
    rollout = batch.logp_rollout[mask]
    parts = Parts(logp_of(batch)[mask], rollout, batch.segment[mask])
    place = places(mask, batch.segment)
    texts = {token: text_of(tokenizer, [token]) for token in set(batch.target_ids.tolist())}
    classes = torch.tensor(token_classes(batch, texts, stop))
    breakdowns = {
        "place in the response": parts.by_edges(place, PLACES),
        "rollout probability": parts.by_edges(rollout.exp(), PROBABILITIES),
        "trainer entropy, nats": parts.by_edges(batch.entropy[mask], ENTROPIES),
        "class of token": parts.by_label(classes, CLASSES),
    }
    turn = batch.turn[mask].long()
    if turn.any():
        names = [f"turn {turn_name(start)}" for start in TURNS]
        breakdowns["turn"] = parts.by_label(turn_bins(turn), names)
    return breakdowns


def token_classes(batch: TokenBatch, texts: dict[int, str], stop: Sequence[int]) -> list[int]:
    """Return the index into CLASSES of every trainable slot's token.

    texts: the text of every predicted token id.
    """
    labels: list[int] = []
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        targets, trained = batch.target_ids[start:end].tolist(), batch.trainable[start:end].tolist()
        path = [int(batch.input_ids[start]), *targets]
        copied = echoed(path, [False, *trained])[1:]
        sampled_texts = [
            texts[token] if is_trained else ""
            for token, is_trained in zip(targets, trained, strict=True)
        ]
        called = inside_calls(sampled_texts)
        labels += [
            class_of(texts[token], end=token in stop, call=call, echo=echo)
            for token, is_trained, call, echo in zip(targets, trained, called, copied, strict=True)
            if is_trained
        ]
    return labels


def worst_tokens(batch: TokenBatch, tokenizer: PreTrainedTokenizerBase) -> list[WorstToken]:
    """Return the WORST tokens with the largest |log rho|, with the text around them."""
    slots = batch.trainable.nonzero()[:, 0]
    place = places(batch.trainable, batch.segment)
    rollout, trainer = batch.logp_rollout[slots], logp_of(batch)[slots]
    out = []
    for i in (trainer - rollout).abs().argsort(descending=True)[:WORST].tolist():
        slot, sequence = int(slots[i]), int(batch.segment[slots[i]])
        first, last = batch.cu_seqlens[sequence : sequence + 2].tolist()
        before = batch.input_ids[max(first, slot + 1 - BEFORE) : slot + 1]
        after = batch.target_ids[slot + 1 : min(last, slot + 1 + AFTER)]
        parts = (before, batch.target_ids[slot : slot + 1], after)
        text, token, rest = (text_of(tokenizer, ids.tolist()) for ids in parts)
        odds = float(rollout[i].exp()), float(trainer[i].exp())
        out.append(WorstToken(sequence, int(place[i]), text, token, rest, *odds))
    return out


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode with special tokens, so that end tokens and the markup of tool calls are visible."""
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
