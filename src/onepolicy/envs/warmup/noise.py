"""Planted sampling errors for warm-up data of tasks without worked steps."""

from __future__ import annotations

import string

import numpy as np

KINDS = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


def garbled(text: str, rng: np.random.Generator, rate: float) -> str:
    """Each letter and digit replaced, with probability `rate`, by a random one of its kind.

    A policy warmed up on this keeps `rate` of its probability on such slips at every character, which is an error of
    sampling and not of knowing; reinforcement learning can remove it at all characters at once.
    """
    slips = rng.random(len(text)) < rate
    draws = rng.random(len(text))
    return "".join(
        _other(character, draw) if slip else character
        for character, slip, draw in zip(text, slips.tolist(), draws.tolist(), strict=True)
    )


def _other(character: str, draw: float) -> str:
    kind = next((kind for kind in KINDS if character in kind), character)
    return kind[int(draw * len(kind))]
