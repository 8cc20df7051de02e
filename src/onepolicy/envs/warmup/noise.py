"""Random character errors in warm-up data of tasks without worked steps."""

from __future__ import annotations

import string

import numpy as np

CHARACTER_CLASSES = (string.digits, string.ascii_lowercase, string.ascii_uppercase)


def add_character_noise(text: str, rng: np.random.Generator, rate: float) -> str:
    """Replace each letter and digit, with probability `rate`, by a random one of its class.

    A policy warmed up on such texts gives `rate` of its probability to these errors at every
    character. They are errors of sampling and not of knowledge, so reinforcement learning can
    remove them at all characters at once.
    """
    errors = rng.random(len(text)) < rate
    draws = rng.random(len(text)).tolist()
    characters = list(text)
    for i in errors.nonzero()[0].tolist():
        characters[i] = _random_of_same_class(text[i], draws[i])
    return "".join(characters)


def _random_of_same_class(character: str, draw: float) -> str:
    """Return a character of the same class. draw: uniform in [0, 1)."""
    members = next((each for each in CHARACTER_CLASSES if character in each), character)
    return members[int(draw * len(members))]
