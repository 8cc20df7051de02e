"""Where the gap sits: by place in the response, by probability, by class of token; and the worst tokens."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.divergence.attribution import k3_terms

PLACES = (0, 8, 32, 128, 512, 2048, 8192, 32768)
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
ENTROPIES = (0.0, 0.1, 0.5, 1.0, 2.0)
TURNS = (*range(8), 8, 16, 32, 64, 128, 256, 512)  # bins of turn numbers, from 0, start here
CLASSES = ("end", "tool call", "prompt echo", "digits", "punctuation", "other")
ECHO = 4  # tokens in a row, as they stand earlier in what was given to the policy, that make the last one an echo
CALL = re.compile(
    r"<\|?(tool_call|tool_calls|function_call|function)\b[^>]*>[\s\S]*?(?:<\|?/\1\|?>|\Z)|^Action:[^\n]*",
    re.MULTILINE,
)
"""A tool call in a response: markup of chat templates (never closed, it reaches to the end), or a ReAct action line."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    tokens: int
    k3: float  # mean of these tokens [nats]
    mean_dlogp: float
    share: float  # of the whole k3


@dataclass(frozen=True, slots=True)
class WorstToken:
    sequence: int
    place: int  # in its response, from 0
    before: str
    token: str
    after: str
    p_rollout: float
    p_trainer: float


def by_label(logp: Tensor, rollout: Tensor, label: Tensor, names: Sequence[str]) -> list[Row]:
    """One row for each label that occurs. logp, rollout, label [n]: label is int64, the index of a name."""
    terms, gap = k3_terms(logp, rollout), (logp.double() - rollout.double()).abs()
    whole, rows = float(terms.sum()), []
    for i, name in enumerate(names):
        here = label == i
        if count := int(here.sum()):
            part = float(terms[here].sum())
            share = part / whole if whole else 0.0
            rows.append(Row(name, count, part / count, float(gap[here].mean()), share))
    return rows


def by_edges(logp: Tensor, rollout: Tensor, value: Tensor, edges: Sequence[float]) -> list[Row]:
    """Bins [edge, next edge) of value [n]; the last one is open."""
    inner = torch.tensor(edges[1:], dtype=torch.float64)
    label = torch.bucketize(value.double(), inner, right=True)
    names = [f"{a:g} to {b:g}" for a, b in itertools.pairwise(edges)] + [f"from {edges[-1]:g}"]
    return by_label(logp, rollout, label, names)


def turn_bins(turn: Tensor) -> Tensor:  # [n] int64, from 0 -> [n] int64
    """Index into TURNS of each turn's bin."""
    return torch.bucketize(turn, torch.tensor(TURNS), right=True) - 1


def turn_name(start: int) -> str:
    """The turns, counted from 1, of the bin of TURNS that starts at `start`."""
    if start < 8:
        return str(start + 1)
    return f"from {start + 1}" if start == TURNS[-1] else f"{start + 1} to {2 * start}"


def places(mask: Tensor, segment: Tensor) -> Tensor:  # [T] bool, [T] int64 -> [n] int64
    """Place of every masked-in slot among those of its sequence, from 0. Slots of a sequence stand together."""
    own = segment[mask]
    starts = torch.searchsorted(own, own)  # first slot of the same sequence
    return torch.arange(len(own), device=own.device) - starts


def token_class(text: str, *, end: bool, call: bool = False, echo: bool = False) -> int:
    """Index into CLASSES, the first that fits. Surrounding white space does not count.

    end: a token that ends the response; call: within a tool call; echo: copied from the prompt.
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
    """Of every token of a path: whether it was sampled, and it and the ECHO - 1 before it stand in a row in what was
    given to the policy before (prompt, tool results)."""
    given: set[tuple[int, ...]] = set()
    out = []
    for i, own in enumerate(sampled):
        last = tuple(path[max(0, i - ECHO + 1) : i + 1])
        out.append(own and last in given)
        if len(last) == ECHO and not any(sampled[i - ECHO + 1 : i + 1]):
            given.add(last)
    return out


def inside_calls(texts: Sequence[str]) -> list[bool]:
    """Of every token, given as its text: whether any of it stands in a tool call."""
    joined, ends = "".join(texts), list(itertools.accumulate(map(len, texts)))
    spans = [match.span() for match in CALL.finditer(joined)]
    return [
        any(start < end and stop > begin for begin, end in spans)
        for start, stop in zip([0, *ends], ends, strict=False)
    ]
