"""Activation checkpoints started inside a replay take it with them.

A recompute may run after the replay context was left, or inside another micro-batch's. It has to take the routes of its
own forward: with any others the gradients are wrong and nothing else would tell. So inside `carried()` both kinds of
`torch.utils.checkpoint` (which transformers, FSDP's checkpoint wrapper and most hand-made checkpoints call) wrap the
function they will run again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint

_REENTRANT, _NON_REENTRANT = "CheckpointFunction", "_checkpoint_without_reentrant_generator"

Replay = Callable[[], AbstractContextManager[None]]
_open: list[Replay] = []  # replays of any model; they need not be left in the reverse order
_original: dict[str, Any] = {}  # what the first of them found
_lock = threading.Lock()


@contextmanager
def carried(replay: Replay) -> Iterator[None]:
    """Whatever is checkpointed in here is recomputed inside `replay()`, whenever and wherever that is."""
    with _lock:
        if not _open:
            _install()
        _open.append(replay)
    try:
        yield
    finally:
        with _lock:
            _open.remove(replay)
            if not _open:
                for name, value in _original.items():
                    setattr(checkpoint, name, value)


def of_checkpoint() -> bool:
    """Does torch.utils.checkpoint run this recompute? One that was started in a replay has its routes installed."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is checkpoint.__dict__:
            return True
    return False


def _install() -> None:
    for name, carrying in ((_REENTRANT, _Carrying), (_NON_REENTRANT, _carrying_generator)):
        _original[name] = getattr(checkpoint, name)
        setattr(checkpoint, name, carrying)


def _carry(function: Callable) -> Callable:
    for replay in _open:
        function = _inside(replay, function)
    return function


def _inside(replay: Replay, function: Callable) -> Callable:
    def replaying(*args: Any, **kwargs: Any) -> Any:
        with replay():
            return function(*args, **kwargs)

    return replaying


class _Carrying:
    @staticmethod
    def apply(function: Callable, *args: Any) -> Any:
        return _original[_REENTRANT].apply(_carry(function), *args)


def _carrying_generator(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return _original[_NON_REENTRANT](_carry(function), *args, **kwargs)
