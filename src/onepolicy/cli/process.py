"""The process of a command: streams whose errors never end it, and what a signal says.

Such errors are an encoding that lacks a character, a pipe without a reader and a full disk. A
command prints after its work is done, so a failed print must not undo the work. When Ctrl-C or
SIGTERM stops a training run, the message gives the command that resumes it and the steps that are
lost. The report of the steps so far follows it.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TextIO

from onepolicy.config import UsageError, printable
from onepolicy.config.output_paths import CONFIG
from onepolicy.config.stored_config import resume_command
from onepolicy.console import print_text
from onepolicy.launch.restarts import newest_checkpoint
from onepolicy.report.jsonl import METRICS, read_jsonl

INTERRUPTED = 130  # exit status of shells after Ctrl-C
PAGE_SECONDS = 20.0
"""Seconds that SIGTERM leaves for the report. Schedulers kill 30 s after it."""


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that accept every text, and restore them afterwards."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def stdout_error() -> str | None:
    """Return the error of stdout, if any. A reader that stopped reading (`| head`) is none."""
    sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = getattr(file, "error", None)
    if error is None or error.errno == errno.EPIPE:
        return None
    return str(error.strerror)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return the stream that a command prints to. One that a test put there stays."""
    if stream is None:  # it was closed before the start
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, TextIOWrapper):
        return stream
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(_TolerantFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _TolerantFile(FileIO):
    """A standard stream that drops everything after its first error."""

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        if self.error is None:
            try:
                return super().write(data)  # type: ignore[arg-type]
            except BlockingIOError:
                raise
            except OSError as error:
                self.error = error
        return len(memoryview(data))  # type: ignore[arg-type]


def describe_stop(signal_name: str, run: Path | None) -> str:
    """Return the message of a command that a signal stopped.

    run: the folder of a training run; None if it has not begun, or for other commands.
    """
    stopped = f"stopped by {signal_name}"
    if run is None:
        return stopped
    if not os.path.isfile(run / CONFIG):
        return f"{stopped} before the run folder {run} was made; nothing is lost"
    resume = resume_command(run)
    saved, done = newest_checkpoint(run), 0
    if not saved:
        return f"{stopped}; {run} has no checkpoint yet: {resume} starts again where the run began"
    with suppress(UsageError):  # no file yet, or a damaged one, which a resume will report
        done = max((row["step"] for row in read_jsonl(run / METRICS)), default=0)
    again = ""
    if done > saved:
        again = f"; finished steps that it computes again: {done - saved}"
    return f"{stopped}; the last checkpoint of {run} is of step {saved}: {resume} continues{again}"


def report_so_far(run: Path) -> str:
    """Write the report of a run that was stopped, and return a line about it.

    Empty if there is no report. Loads torch, unless the run has.
    """
    if not os.path.isfile(run / METRICS):
        return ""
    from onepolicy.run.summary import write_report_so_far

    try:
        page = write_report_so_far(run)
    except (UsageError, OSError) as error:
        return f"no report of the steps so far: {error}"
    if page is None:
        return ""
    return f"report of the steps so far: {page}; {resume_command(run)} continues the run"


def _run_with_report(arguments: argparse.Namespace | None) -> Path | None:
    """Return the folder of the run that this process, or the ranks it started, trained.

    None for another command, before the run has begun, and on a rank: its agent writes the report.
    """
    begun = hasattr(sys.modules.get("onepolicy.run.train_command"), "run_to_end")
    begun = begun or getattr(arguments, "had_ranks", False)
    if not begun or getattr(arguments, "on_rank", False):
        return None
    return getattr(arguments, "folder", None)


def report_interrupt(arguments: argparse.Namespace | None) -> int:
    """Report that Ctrl-C stopped the command, and return the exit status.

    A second Ctrl-C from here on ends the process at once, without a message.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    message = describe_stop("Ctrl-C", getattr(arguments, "folder", None))
    print_text(f"\nonepolicy: {message}", stderr=True)
    run = _run_with_report(arguments)
    if run is not None:
        print_stopped_report(run)
    return INTERRUPTED


def print_stopped_report(run: Path) -> None:
    """Write the report of a run that was stopped, and say where it is."""
    line = report_so_far(run)
    if line:
        print_text(f"onepolicy: {line}", stderr=True)


@contextmanager
def report_sigterm(arguments: argparse.Namespace) -> Iterator[None]:
    """Print a message, and write the report, before SIGTERM ends the process as usual.

    The report gets PAGE_SECONDS. A second SIGTERM ends the process at once. Does nothing under
    torchrun: Python would run the handler only after the main thread has left a collective of NCCL.
    """
    not_ours = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # ignored, or another's
    in_main_thread = threading.current_thread() is threading.main_thread()
    if "WORLD_SIZE" in os.environ or not_ours or not in_main_thread:
        yield
        return
    owner = os.getpid()

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == owner:  # a process forked from this one prints nothing
                _write_line(describe_stop("SIGTERM", getattr(arguments, "folder", None)))
                run = _run_with_report(arguments)
                if run is not None:
                    # the signal may have come where a lock is held that the report needs
                    limit = threading.Timer(PAGE_SECONDS, os.kill, (owner, number))
                    limit.start()
                    _write_line(report_so_far(run))
        finally:
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_line(message: str) -> None:
    """Write a line to stderr. By os.write, because a signal may have interrupted a print."""
    if message:
        with suppress(OSError):
            os.write(2, f"onepolicy: {printable(message)}\n".encode(errors="backslashreplace"))
