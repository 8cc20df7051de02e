"""Random numbers and the train / held-out split, each a function of its key alone."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

Split = Literal["train", "held_out"]
HELD_OUT_EVERY = 4  # one question in four is held out


def hash_key(*key: object, size: int = 16) -> int:
    """Return a hash of the key's repr as an integer of `size` bytes."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=size).digest(), "little")


def seeded_rng(*key: object) -> np.random.Generator:
    """Return a Philox generator seeded with the 128-bit hash of `key`."""
    return np.random.Generator(np.random.Philox(key=hash_key(*key)))


def split_of_text(question: str) -> Split:
    """Return a question's split, from the hash of its text.

    No question is in both splits, whatever the seed.
    """
    if hash_key("split", question) % HELD_OUT_EVERY == 0:
        return "held_out"
    return "train"
