"""Random numbers and the train / held-out split, each a function of its key alone: nothing depends on the past."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 4  # one question in four is held out


def digest(*key: object, size: int = 16) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def rng_of(*key: object) -> np.random.Generator:
    """Philox keyed by the 128-bit hash of `key`."""
    return np.random.Generator(np.random.Philox(key=digest(*key)))


def split_of(question: str) -> Split:
    """The side a question is on, by the hash of its own text: no question is ever on both, whatever the seed."""
    return "held_out" if digest("split", question) % HELD_OUT_SHARE == 0 else "train"
