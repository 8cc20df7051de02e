"""Activation checkpoints started inside a replay take it with them.

A recompute may run after the replay context was left, or inside another micro-batch's. It has to take the routes of its
own forward: with any others the gradients are wrong and nothing else would tell. So inside `carried()` both kinds of
`torch.utils.checkpoint` (which transformers, FSDP's checkpoint wrapper and most hand-made checkpoints call) wrap the
function they will run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint

_REENTRANT, _NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"


@contextmanager
def carried(replay: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Whatever is checkpointed in here is recomputed inside `replay()`, whenever and wherever that is."""
    reentrant, non_reentrant = getattr(checkpoint, _REENTRANT), getattr(checkpoint, _NON_REENTRANT)

    def carrying(function: Callable) -> Callable:
        def replaying(*args: Any, **kwargs: Any) -> Any:
            with replay():
                return function(*args, **kwargs)

        return replaying

    class Carrying:
        @staticmethod
        def apply(function: Callable, *args: Any) -> Any:
            return reentrant.apply(carrying(function), *args)

    def generator(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return non_reentrant(carrying(function), *args, **kwargs)

    setattr(checkpoint, _REENTRANT, Carrying)
    setattr(checkpoint, _NON_REENTRANT, generator)
    try:
        yield
    finally:
        setattr(checkpoint, _REENTRANT, reentrant)
        setattr(checkpoint, _NON_REENTRANT, non_reentrant)
