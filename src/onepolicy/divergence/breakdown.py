"""The gap by place in the response, by probability and by class of token; and the worst tokens."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onepolicy.divergence import attribution
from onepolicy.record.means import Mean, means_by
from onepolicy.record.statistics import k3_terms
from onepolicy.types import TokenBatch

PLACES = (0, 8, 32, 128, 512, 2048, 8192, 32768)
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
ENTROPIES = (0.0, 0.1, 0.5, 1.0, 2.0)
TURNS = (*range(8), 8, 16, 32, 64, 128, 256, 512)  # bins of turn numbers, from 0, start here
CLASSES = ("end", "tool call", "prompt echo", "digits", "punctuation", "other")
ECHO = 4  # tokens in a row that must occur earlier in the given text for the last one to be an echo
CALL = re.compile(
    r"<\|?(tool_call|tool_calls|function_call|function)\b[^>]*>[\s\S]*?(?:<\|?/\1\|?>|\Z)"
    r"|^Action:[^\n]*",
    re.MULTILINE,
)
"""A tool call in a response: markup of chat templates, to the end if it is never closed, or a ReAct
action line."""


@dataclass(frozen=True, slots=True)
class Row:
    """Statistics of one part of the tokens."""

    name: str
    tokens: int
    k3: float  # mean of these tokens [nats]
    mean_dlogp: float
    share: float  # of the whole k3


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large gap, and the text around it."""

    sequence: int
    place: int  # in its response, from 0
    before: str
    token: str
    after: str
    p_rollout: float
    p_trainer: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Tokens of a scored batch, to be divided into parts."""

    logp: Tensor  # [n] float32, trainer
    rollout: Tensor  # [n] float32
    segment: Tensor  # [n] integers, ascending: the sample of each token

    def by_label(self, label: Tensor, names: Sequence[str]) -> list[Row]:
        """Return one row for each label that occurs. label: [n] int64, the index of a name."""
        log_rho = (self.logp.double() - self.rollout.double()).cpu().numpy()
        labels, row = label.cpu().numpy(), self.segment.cpu().numpy()
        terms = k3_terms(log_rho)
        k3, gap = means_by(labels, terms, row), means_by(labels, np.abs(log_rho), row)
        whole = Mean.of(terms, row)
        total = whole.mean * whole.tokens or 1.0  # without a gap every share is 0
        return [
            Row(names[i], part.tokens, part.mean, gap[i].mean, part.mean * part.tokens / total)
            for i, part in sorted(k3.items())
        ]

    def by_edges(self, value: Tensor, edges: Sequence[float]) -> list[Row]:
        """Return one row for each bin [edge, next edge) of value [n]; the last bin is open."""
        inner = torch.tensor(edges[1:], dtype=torch.float64)
        label = torch.bucketize(value.double(), inner, right=True)
        names = [f"{a:g} to {b:g}" for a, b in itertools.pairwise(edges)] + [f"from {edges[-1]:g}"]
        return self.by_label(label, names)


def turn_bins(turn: Tensor) -> Tensor:  # [n] int64, from 0 -> [n] int64
    """Return the index into TURNS of each turn's bin."""
    return torch.bucketize(turn, torch.tensor(TURNS), right=True) - 1


def metrics_per_turn(batch: TokenBatch) -> dict[str, float]:
    """Return mismatch/k3_turn@k and train/tokens_turn@k of a scored batch.

    These are k3 and the number of the tokens of turn k, up to the next bin.
    """
    turn = batch.turn[batch.trainable].long()
    return _k3_by_bins(batch, turn, "mismatch/k3_turn", "train/tokens_turn")


def metrics_per_staleness(batch: TokenBatch, version: int) -> dict[str, float]:
    """Return mismatch/k3_staleness@k and staleness/tokens@k.

    These are k3 and the number of the tokens that were sampled k updates before `version`, up to
    the next bin. version: of the weights that scored the batch.
    """
    age = version - batch.version[batch.trainable].long()
    return _k3_by_bins(batch, age, "mismatch/k3_staleness", "staleness/tokens")


def _k3_by_bins(batch: TokenBatch, number: Tensor, k3: str, tokens: str) -> dict[str, float]:
    """Return metrics `k3`@k and `tokens`@k of a scored batch.

    number: [n] int64 of each trainable slot. Numbers below 0 are left out.
    """
    mask = batch.trainable.clone()
    mask[mask.clone()] = number >= 0
    number = number[number >= 0]
    assert batch.logp_old is not None
    terms = attribution.k3_terms(batch.logp_old[mask], batch.logp_rollout[mask])
    given = (turn_bins(number), terms, batch.segment[mask])
    found = means_by(*(each.detach().cpu().numpy() for each in given))
    means = {f"{k3}@{TURNS[i]}": of_bin.mean for i, of_bin in found.items()}
    return means | {f"{tokens}@{TURNS[i]}": float(each.tokens) for i, each in found.items()}


def turn_name(start: int, first: int = 1) -> str:
    """Return the turns of the bin of TURNS that starts at `start`. first: number of the first."""
    if start < 8:
        return str(start + first)
    if start == TURNS[-1]:
        return f"from {start + first}"
    return f"{start + first} to {2 * start - 1 + first}"


def places(mask: Tensor, segment: Tensor) -> Tensor:  # [T] bool, [T] int64 -> [n] int64
    """Return the place of every masked-in slot in its sequence, from 0.

    Slots of a sequence must be next to each other.
    """
    sequence = segment[mask]
    starts = torch.searchsorted(sequence, sequence)  # first slot of the same sequence
    return torch.arange(len(sequence), device=sequence.device) - starts


def token_class(text: str, *, end: bool, call: bool = False, echo: bool = False) -> int:
    """Return the index into CLASSES of the first class that fits. White space around is ignored.

    end: the token ends the response; call: it is in a tool call; echo: it is copied from the
    prompt.
    """
    core = text.strip()
    fits = {
        "end": end,
        "tool call": call,
        "prompt echo": echo,
        "digits": bool(core) and all(c.isdigit() for c in core),
        "punctuation": bool(core) and all(c in string.punctuation for c in core),
        "other": True,
    }
    return CLASSES.index(next(name for name in CLASSES if fits[name]))


def echoed(path: Sequence[int], sampled: Sequence[bool]) -> list[bool]:
    """Return for every token of a path whether it is sampled and echoes the given text.

    It is an echo if it and the ECHO - 1 tokens before it occur in a row in the text given to the
    policy earlier (prompt, tool results).
    """
    given: set[tuple[int, ...]] = set()
    out = []
    for i, is_sampled in enumerate(sampled):
        last = tuple(path[max(0, i - ECHO + 1) : i + 1])
        out.append(is_sampled and last in given)
        if len(last) == ECHO and not any(sampled[i - ECHO + 1 : i + 1]):
            given.add(last)
    return out


def inside_calls(texts: Sequence[str]) -> list[bool]:
    """Return for every token, given as its text, whether any of it is in a tool call."""
    joined, ends = "".join(texts), list(itertools.accumulate(map(len, texts)))
    spans = [match.span() for match in CALL.finditer(joined)]
    return [
        any(start < end and stop > begin for begin, end in spans)
        for start, stop in zip([0, *ends], ends, strict=False)
    ]
