"""Activation checkpoints that keep the replay they were started in.

A recompute may run after the replay context was left, or inside another micro-batch's context. It
must use the routes of its own forward. With other routes the gradients would be wrong, and nothing
else would show it. So inside `carry_into_recomputes()` every checkpoint wraps the function that it
will run again. This covers both kinds of `torch.utils.checkpoint` (which transformers, FSDP's
checkpoint wrapper and most other checkpoints call) and torch's composable one. A trainer with a
checkpoint of its own adds it with `carry_also`.

Each thread has its own open replays. A checkpoint of a thread without one is left as it is, so
another model may train beside a replay.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from onepolicy.config import UsageError
from onepolicy.replay.private_names import (
    CHECKPOINT_FORWARD,
    CHECKPOINT_FUNCTION,
    CHECKPOINT_GENERATOR,
    CHECKPOINT_MODULE,
    COMPOSABLE,
    GENERATOR,
)

Replay = Callable[[], AbstractContextManager[None]]


class _OpenReplays(threading.local):
    """The replays of all models that are open in this thread, in no particular order."""

    def __init__(self) -> None:
        self.open: list[Replay] = []


_thread = _OpenReplays()
_lock = threading.Lock()
_users = 0  # open replays of all threads
_others: dict[Any, Callable[..., Any]] = {}  # checkpoint of a trainer -> its own forward


def carry_also(function: Any) -> None:
    """Carry replays into the recomputes of another checkpoint too.

    function: a subclass of torch.autograd.Function whose forward takes (ctx, run function, ...),
        and whose backward, in the same module, runs that function again.
    """
    with _lock:
        if function not in _others:
            _others[function] = function.forward
            if _users:
                function.forward = _carrying(function.forward)


@contextmanager
def carry_into_recomputes(replay: Replay) -> Iterator[None]:
    """Recompute inside `replay()` every checkpoint that this thread starts in here.

    This holds wherever and whenever the recompute runs.
    """
    global _users
    with _lock:
        _users += 1
        patch_checkpoints(_carrying_forward, _carrying_generator)
        for function, forward in _others.items():
            function.forward = _carrying(forward)
    try:
        with _opened(replay):
            yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                patch_checkpoints(CHECKPOINT_FORWARD, CHECKPOINT_GENERATOR)
                for function, forward in _others.items():
                    function.forward = forward


@cache
def check_checkpoints() -> None:
    """Raise UsageError unless both kinds of torch's checkpoints run what carries a replay.

    A later torch may have the private names, and make its checkpoints without them.
    """
    for reentrant in (False, True):
        entered: list[bool] = []

        @contextmanager
        def replay(entered: list[bool] = entered) -> Iterator[None]:
            entered.append(True)
            yield

        with torch.enable_grad(), carry_into_recomputes(replay):
            one = torch.ones(1, device="cpu", requires_grad=True)
            CHECKPOINT_MODULE.checkpoint(torch.sin, one, use_reentrant=reentrant).backward()
        if not entered:
            raise UsageError(
                f"torch {torch.__version__} makes checkpoints (use_reentrant={reentrant}) in a new "
                "way, so a recompute would silently use other experts than its forward; install a "
                "torch of docs/reference/versions.md"
            )


def called_by_checkpoint() -> bool:
    """Return whether a checkpoint that carries replays is running this recompute.

    A checkpoint that was started in a replay has its routes installed.
    """
    names = {CHECKPOINT_MODULE.__name__, *(function.__module__ for function in _others)}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in names:
            return True
    return False


def patch_checkpoints(forward: Callable[..., Any], generator: Callable[..., Any]) -> None:
    """Replace the two functions by which torch makes every activation checkpoint.

    The class is patched, so that code that imported the class by name is covered too.
    """
    CHECKPOINT_FUNCTION.forward = staticmethod(forward)
    for module in (CHECKPOINT_MODULE, sys.modules.get(COMPOSABLE)):
        if module is not None:
            setattr(module, GENERATOR, generator)


@contextmanager
def _opened(replay: Replay) -> Iterator[None]:
    _thread.open.append(replay)
    try:
        yield
    finally:
        _thread.open.remove(replay)


def _inside_open_replays(function: Callable[..., Any]) -> Callable[..., Any]:
    for replay in dict.fromkeys(_thread.open):
        function = _inside(replay, function)
    return function


def _inside(replay: Replay, function: Callable[..., Any]) -> Callable[..., Any]:
    def replaying(*args: Any, **kwargs: Any) -> Any:
        # A recompute may run in a thread of autograd, and may itself start checkpoints.
        with replay(), _opened(replay):
            return function(*args, **kwargs)

    return replaying


def _carrying(forward: Callable[..., Any]) -> Any:
    def carrying_forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _inside_open_replays(function), *args)

    return staticmethod(carrying_forward)


def _carrying_forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
    return CHECKPOINT_FORWARD(ctx, _inside_open_replays(function), *args)


def _carrying_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return CHECKPOINT_GENERATOR(_inside_open_replays(function), *args, **kwargs)
