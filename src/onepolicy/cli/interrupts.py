"""The message and the exit status of a command that Ctrl-C or SIGTERM stops.

The message of a training run gives the command that resumes it, and the steps that are lost.
"""

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

from onepolicy.cli.common import CHECKPOINTS
from onepolicy.config import UsageError, printable
from onepolicy.config.output_paths import CONFIG
from onepolicy.console import print_text
from onepolicy.report.jsonl import read_jsonl

INTERRUPTED = 130  # exit status of shells after Ctrl-C


def describe_stop(signal_name: str, run: Path | None) -> str:
    """Return the message of a command that a signal stopped.

    run: the folder of a training run; None if it has not begun, or for other commands.
    """
    stopped = f"stopped by {signal_name}"
    if run is None:
        return stopped
    try:
        begun = (run / CONFIG).is_file()
        saved = _newest_checkpoint(run)
        done = _last_step(run)
    except OSError:
        return f"{stopped}; {run} cannot be read"
    if not begun:
        return f"{stopped} before the run folder {run} was made; nothing is lost"
    resume = f"`onepolicy train --resume {shlex.quote(str(run))}`"
    if saved is None:
        return f"{stopped}; {run} has no checkpoint yet: {resume} starts again where the run began"
    return (
        f"{stopped}; the last checkpoint of {run} is of step {saved}, "
        f"{_describe_lost_steps(done - saved)}: {resume} continues"
    )


def _describe_lost_steps(lost: int) -> str:
    if lost <= 0:
        return "no finished step is lost"
    if lost == 1:
        return "1 finished step after it will be computed again"
    return f"{lost} finished steps after it will be computed again"


def _newest_checkpoint(run: Path) -> int | None:
    """Return the step of the newest checkpoint, from folder names: torch may not be loaded yet."""
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        return None
    matches = [re.fullmatch(r"step_([0-9]+)", name) for name in os.listdir(folder)]
    return max((int(match[1]) for match in matches if match), default=None)


def _last_step(run: Path) -> int:
    try:
        rows = read_jsonl(run / "metrics.jsonl")
    except UsageError:  # no file yet, or a damaged one, which a resume will report
        return 0
    return max((row["step"] for row in rows), default=0)


def report_interrupt(arguments: argparse.Namespace | None) -> int:
    """Report that Ctrl-C stopped the command, and return the exit status.

    A second Ctrl-C from here on ends the process at once, without a message.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    message = describe_stop("Ctrl-C", getattr(arguments, "folder", None))
    print_text(f"\nonepolicy: {message}", stderr=True)
    return INTERRUPTED


@contextmanager
def report_sigterm(arguments: argparse.Namespace) -> Iterator[None]:
    """Print a message before SIGTERM ends the process as usual.

    Does nothing under torchrun: Python would run the handler only after the main thread has left a
    collective of NCCL.
    """
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not is_default or "WORLD_SIZE" in os.environ or not in_main_thread:
        yield
        return
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:  # a process forked from this one prints nothing
            message = describe_stop("SIGTERM", getattr(arguments, "folder", None))
            encoding = sys.stderr.encoding or "utf-8"
            with suppress(OSError):  # os.write, because the signal may have interrupted a print
                line = f"onepolicy: {printable(message)}\n"
                os.write(2, line.encode(encoding, "backslashreplace"))
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
