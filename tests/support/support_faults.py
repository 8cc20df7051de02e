"""Synthetic dumps with supports, clean and with one planted fault each."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onepolicy.support.trace import SupportTrace
from support.audit_faults import SMALL, World, logp, world

TOP_P = 0.8
Sets = list[list[int]]


def cut(logits: Tensor, top_p: float = TOP_P) -> Tensor:
    """Return the logits of each row's likeliest tokens, -inf elsewhere."""
    p, order = logits.softmax(-1).sort(descending=True)
    out = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= top_p)
    return logits.masked_fill(out, -math.inf)


def supported_world(
    seed: int,
    gap: str = SMALL,
    *,
    temperature: float = 1.0,
    engine_raw: bool = False,
    trainer_raw: bool = False,
    trainer_top_p: float | None = None,
) -> tuple[World, Sets]:
    """Return a world that sampled with top-p, and the set of every token.

    temperature: the engine's, which the trainer does not know. *_raw: values over the whole
    vocabulary. trainer_top_p: the trainer cuts its own distribution, as one does without the sets.
    """
    w = world(seed, gap)
    hot = w.engine / temperature
    kept = cut(hot)
    sets = kept.isfinite()
    w.draw(kept)
    trainer = w.trainer.masked_fill(~sets, -math.inf)
    if trainer_top_p is not None:
        trainer = cut(w.trainer, trainer_top_p)
        trainer = trainer.scatter(1, w.tokens[:, None], w.trainer.gather(1, w.tokens[:, None]))
    if trainer_raw:
        trainer = w.trainer
    w.score(engine=hot if engine_raw else kept, trainer=trainer)
    own = torch.where(w.sampled, w.tokens, trainer.argmax(-1))  # prompts hold anything
    w.columns["logp_rollout"] = torch.where(w.sampled, w.columns["logp_rollout"], 0.0)
    w.columns["logp_trainer"] = logp(trainer, own)
    w.columns["logp_vocabulary"] = logp(w.trainer, w.tokens)
    listed = SupportTrace.from_mask(sets & w.sampled[:, None]).as_sets()
    return w, listed


def rows_of(w: World, sets: Sets) -> list[dict]:
    """Return the rows of a dump."""
    columns = w.columns | {"support_counts": torch.tensor([len(each) for each in sets])}
    rows: list[dict] = []
    end = 0
    for row, length in enumerate(w.lengths.tolist()):
        start, end = end, end + length
        rows.append({})
        for name, values in columns.items():
            if len(values) == w.rows:
                rows[-1][name] = values[row].item()
            else:
                rows[-1][name] = values[start:end].tolist()
        rows[-1]["support_ids"] = [each for part in sets[start:end] for each in part]
    return rows


def _moved(by: int) -> Callable[[World, Sets], Sets]:
    return lambda w, sets: sets[-by:] + sets[:-by]


def _of_other_rows(w: World, sets: Sets) -> Sets:
    """Give every sampled token the set of one far away."""
    at = w.sampled.nonzero()[:, 0].tolist()
    moved = dict(zip(at, at[500:] + at[:500], strict=True))
    return [sets[moved[i]] if i in moved else [] for i in range(len(sets))]


def _without_token(w: World, sets: Sets) -> Sets:
    """Take its own token out of one set in 50 that have others."""
    out = list(sets)
    for i in [i for i, each in enumerate(sets) if len(each) > 1][::50]:
        out[i] = [each for each in sets[i] if each != int(w.tokens[i])]
    return out


def _missing(w: World, sets: Sets) -> Sets:
    return [each if i % 20 else [] for i, each in enumerate(sets)]


def _twice(w: World, sets: Sets) -> Sets:
    """Repeat an id in every tenth set of two or more, as a trainer that pads with one would."""
    repeated = [[*each, *each[1:][-1:]] for each in sets]
    return [repeated[i] if i % 10 == 0 else each for i, each in enumerate(sets)]


def _same(w: World, sets: Sets) -> Sets:
    return sets


PLANTED: dict[str, tuple[dict, Callable[[World, Sets], Sets], str, str]] = {
    "the engine's values are raw": (
        {"engine_raw": True},
        _same,
        "support",
        "engine's values are raw",
    ),
    "the trainer's values are raw": (
        {"trainer_raw": True},
        _same,
        "support",
        "the trainer's values are over the whole vocabulary",
    ),
    "the trainer cuts at another top-p": (
        {"trainer_top_p": 0.95},
        _same,
        "support",
        "cut by another top-p",
    ),
    "another temperature": ({"temperature": 0.7}, _same, "temperature", "0.7"),
    "a token late": ({}, _moved(1), "sets", "of the tokens before them are"),
    "a token early": ({}, _moved(-1), "sets", "of the tokens after them are"),
    "of other requests": ({}, _of_other_rows, "sets", "are of other requests"),
    "without the token": ({}, _without_token, "sets", "not in their own support"),
    "missing": ({}, _missing, "sets", "have no support"),
    "an id twice": ({}, _twice, "sets", "more than once in their support"),
}
"""Fault: arguments of the world, what is done to its sets, cause, words of the verdict."""
