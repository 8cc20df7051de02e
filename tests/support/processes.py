"""Tests that start processes have a lane of their own in `make test`: they are marked `process`,
and one that is not marked fails."""

from __future__ import annotations

import math
import os
import pkgutil
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from onepolicy.bounded import GIB
from onepolicy.errors import UsageError
from support.gate import COMPONENTS

EVENTS = {"subprocess.Popen": 1, "os.fork": None, "os.forkpty": None, "os.posix_spawn": 0}
"""Audit event -> which of its arguments is the command."""

QUICK = ("uname", "ldconfig", "lscpu", "gcc", "g++", "cc", "c++", "git", "nvidia-smi", "file")
"""Programs that libraries ask about the machine, and that end at once."""

_started: dict[str, list[str]] = {}
"""The running test -> what it started."""


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS and _started:
        place = EVENTS[event]
        command = event if place is None else arguments[place]
        words = command if isinstance(command, list | tuple) else [command]
        text = " ".join(map(str, words)).removeprefix("/bin/sh -c ")
        if text.split()[0].rpartition("/")[2] not in QUICK:
            for found in _started.values():
                found.append(text[:200])


sys.addaudithook(_note)


@contextmanager
def watch(item: pytest.Item) -> Iterator[None]:
    """Note what the test and its fixtures start."""
    _started[item.nodeid] = []
    try:
        yield
    finally:
        del _started[item.nodeid]


def run_task(task: str, arguments: dict[str, Any], limits: object) -> Iterator[Any]:
    """Stand in for `bounded.stream`: run the task in this process, without limits.

    A child for each of a thousand dumps would take minutes. Tests with the marker `process` have
    the child.
    """
    messages = pkgutil.resolve_name(task)(**arguments)
    next(messages)  # what the child has imported when its limits begin
    yield from messages


def ends_in_fork(
    task: str, arguments: dict[str, Any], cpu_seconds: float, memory: int = 8 * GIB
) -> int:
    """Run the task in a fork with a limit of CPU time and one of memory, which starts at once.

    memory: bytes beside those that this process has. Return its status: 0 whole, 2 UsageError, 1
    another error, below 0 a signal.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    memory += pages * resource.getpagesize()
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        seconds = math.ceil(cpu_seconds)  # a fork begins at 0
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        with suppress(BaseException):
            try:
                for _ in run_task(task, arguments, None):
                    pass
                status = 0
            except UsageError:
                status = 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def answer_task(task: str, question: Any, limits: object) -> Any:
    """Stand in for `bounded.ask` likewise."""
    messages = pkgutil.resolve_name(task)()
    next(messages)
    return messages.send(question)


def unmarked(item: pytest.Item) -> list[str]:
    """Return the commands that a test without the marker `process` has started.

    Slow tests and those of components are not in the lanes of `make test`.
    """
    if any(item.get_closest_marker(name) for name in ("process", "slow", *COMPONENTS)):
        return []
    return _started.get(item.nodeid, [])
