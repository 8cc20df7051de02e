"""The message and the exit status of a command that Ctrl-C or SIGTERM stops.

The message of a training run gives the command that resumes it, and the steps that are lost.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from onepolicy.config import UsageError, printable
from onepolicy.config.output_paths import CONFIG
from onepolicy.console import print_text
from onepolicy.launch.restarts import newest_checkpoint
from onepolicy.report.jsonl import read_jsonl

INTERRUPTED = 130  # exit status of shells after Ctrl-C


def describe_stop(signal_name: str, run: Path | None) -> str:
    """Return the message of a command that a signal stopped.

    run: the folder of a training run; None if it has not begun, or for other commands.
    """
    stopped = f"stopped by {signal_name}"
    if run is None:
        return stopped
    if not os.path.isfile(run / CONFIG):
        return f"{stopped} before the run folder {run} was made; nothing is lost"
    resume = f"`onepolicy train --resume {shlex.quote(str(run))}`"
    saved, done = newest_checkpoint(run), 0
    if not saved:
        return f"{stopped}; {run} has no checkpoint yet: {resume} starts again where the run began"
    with suppress(UsageError):  # no file yet, or a damaged one, which a resume will report
        done = max((row["step"] for row in read_jsonl(run / "metrics.jsonl")), default=0)
    again = ""
    if done > saved:
        again = f"; finished steps that it computes again: {done - saved}"
    return f"{stopped}; the last checkpoint of {run} is of step {saved}: {resume} continues{again}"


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
    not_ours = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # ignored, or another's
    in_main_thread = threading.current_thread() is threading.main_thread()
    if "WORLD_SIZE" in os.environ or not_ours or not in_main_thread:
        yield
        return
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:  # a process forked from this one prints nothing
            message = printable(describe_stop("SIGTERM", getattr(arguments, "folder", None)))
            with suppress(OSError):  # os.write, because the signal may have interrupted a print
                os.write(2, f"onepolicy: {message}\n".encode(errors="backslashreplace"))
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
