"""What a command says when Ctrl-C or SIGTERM ends it, and how it ends. A training run says what a resume costs."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from onepolicy.config import UsageError
from onepolicy.config.stored import CONFIG
from onepolicy.report.jsonl import read_jsonl

INTERRUPTED = 130  # exit status, as shells have it


def words(by: str, run: Path | None) -> str:
    """One sentence or two. by: what stopped the command. run: the folder of a training run, if it has begun."""
    if run is None:
        return f"stopped by {by}"
    try:
        begun = (run / CONFIG).is_file()
        saved = _newest_checkpoint(run)
        done = _last_step(run)
    except OSError:
        return f"stopped by {by}; {run} cannot be read"
    if not begun:
        return f"stopped by {by} before the run folder {run} was made; nothing is lost"
    resume = f"`onepolicy train --resume {shlex.quote(str(run))}`"
    if saved is None:
        return f"stopped by {by}; {run} has no checkpoint yet: {resume} starts again where the run began"
    lost = max(0, done - saved)
    steps = "no finished step is lost"
    if lost:
        steps = (
            f"{lost} finished {'step' if lost == 1 else 'steps'} after it will be computed again"
        )
    return f"stopped by {by}; the last checkpoint of {run} is of step {saved}, {steps}: {resume} continues"


def _newest_checkpoint(run: Path) -> int | None:
    """Read by name only: torch, which reads checkpoints, may not be loaded yet."""
    folder = run / "checkpoints"
    names = os.listdir(folder) if folder.is_dir() else []
    steps = [int(found[1]) for name in names if (found := re.fullmatch(r"step_([0-9]+)", name))]
    return max(steps, default=None)


def _last_step(run: Path) -> int:
    try:
        rows = read_jsonl(run / "metrics.jsonl")
    except UsageError:  # not there yet, or damaged: a resume will say so
        return 0
    return max((row["step"] for row in rows), default=0)


def interrupted(arguments: argparse.Namespace | None) -> int:
    """Say what Ctrl-C stopped; the exit status. From here on a second one ends the process at once, without a word."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    print(
        f"\nonepolicy: {words('Ctrl-C', getattr(arguments, 'folder', None))}",
        file=sys.stderr,
        flush=True,
    )
    return INTERRUPTED


@contextmanager
def telling_of_sigterm(arguments: argparse.Namespace) -> Iterator[None]:
    """SIGTERM ends the process as it always does, but says so first.

    Not under torchrun: a handler of Python's waits while the main thread stands in a collective of NCCL.
    """
    default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "WORLD_SIZE" not in os.environ
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:  # not of a process that was forked from this one
            text = f"onepolicy: {words('SIGTERM', getattr(arguments, 'folder', None))}\n"
            with suppress(OSError):  # not print(), which may be what was interrupted
                os.write(2, text.encode(sys.stderr.encoding or "utf-8", "backslashreplace"))
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
