"""Scores of answers that may take reasoning-gym for ever, in a child with limits, without torch.

A child that an answer ended is started again, and the step waits for its imports.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from onepolicy.bounded import Message
from onepolicy.errors import LIBRARY_ERRORS


def score() -> Generator[Message | None, dict[str, Any], None]:
    """Score answers that are evaluated, as a task of bounded.py that is asked."""
    import reasoning_gym

    question = yield None
    while True:
        dataset = reasoning_gym.create_dataset(
            question["name"], seed=0, size=1, **question["params"]
        )
        try:
            found = float(dataset.score_answer(question["answer"], question["entry"]))
        except LIBRARY_ERRORS:  # the response is not of the form the library's grader reads
            found = 0.0
        question = yield Message({"score": found})
