"""Activation checkpoints started inside a replay take it with them.

A recompute may run after the replay context was left, or inside another micro-batch's. It has to take the routes of its
own forward: with any others the gradients are wrong and nothing else would tell. So inside `carried()` both kinds of
`torch.utils.checkpoint` (which transformers, FSDP's checkpoint wrapper and most hand-made checkpoints call), and
torch's composable one, wrap the function they will run again.

Each thread has its own open replays. A checkpoint of a thread without one passes through unchanged, so another model
that trains beside a replay never meets it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils import checkpoint

Replay = Callable[[], AbstractContextManager[None]]


class _Thread(threading.local):
    """The replays that are open in this thread, of any model; they need not be left in the reverse order."""

    def __init__(self) -> None:
        self.open: list[Replay] = []


_GENERATOR = "_checkpoint_without_reentrant_generator"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"  # imports the generator by name
_thread = _Thread()
_lock = threading.Lock()
_users = 0  # open replays of all threads
_forward: Any = (
    checkpoint.CheckpointFunction.forward
)  # the class, so that whoever imported it by name is served too
_generator: Any = getattr(checkpoint, _GENERATOR)


@contextmanager
def carry_into_recomputes(replay: Replay) -> Iterator[None]:
    """Whatever this thread checkpoints in here is recomputed inside `replay()`, whenever and wherever that is."""
    global _users
    with _lock:
        _users += 1
        _patch(_carrying_forward, _carrying_generator)
    try:
        with _opened(replay):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _patch(_forward, _generator)


def called_by_checkpoint() -> bool:
    """Does torch.utils.checkpoint run this recompute? One that was started in a replay has its routes installed."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is checkpoint.__dict__:
            return True
    return False


def _patch(forward: Callable[..., Any], generator: Callable[..., Any]) -> None:
    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]
    for module in (checkpoint, sys.modules.get(_COMPOSABLE)):
        if module is not None:
            setattr(module, _GENERATOR, generator)


@contextmanager
def _opened(replay: Replay) -> Iterator[None]:
    _thread.open.append(replay)
    try:
        yield
    finally:
        _thread.open.remove(replay)


def _carry(function: Callable[..., Any]) -> Callable[..., Any]:
    for replay in dict.fromkeys(_thread.open):
        function = _inside(replay, function)
    return function


def _inside(replay: Replay, function: Callable[..., Any]) -> Callable[..., Any]:
    def replaying(*args: Any, **kwargs: Any) -> Any:
        with (
            replay(),
            _opened(replay),
        ):  # a recompute may run in a thread of autograd, and hold checkpoints itself
            return function(*args, **kwargs)

    return replaying


def _carrying_forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
    return _forward(ctx, _carry(function), *args)


def _carrying_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _generator(_carry(function), *args, **kwargs)
