"""`onepolicy train --restarts N`: a run in a process of its own, resumed after every crash.

Some ends are final: exit status 2 (a setting, a damaged file), Ctrl-C and SIGTERM. The supervisor
also gives up a run that crashes in the same step again and again, or that makes no progress. It
always reports why it ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onepolicy.config import ServiceUnavailable
from onepolicy.config.output_paths import BEGUN, CONFIG

# Numbers of crashes after which the supervisor gives up
MAX_CRASHES_IN_STEP = 3  # in a row in one step: the step itself is at fault
MAX_STALLED = 6  # in a row, in any steps, without a later step or a new checkpoint
MAX_UNSAVED = 20  # in a row, each in a later step, without a new checkpoint to resume from
MAX_CRASHES_BEFORE_STEP = 10  # in a row before any step: their waits alone take 4 minutes

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # before a restart; doubled until the run makes progress
POLL_S = 0.1  # between two checks whether the process has ended
FROM_KERNEL = 0x80  # si_code of a signal that no process sent by `kill`, such as a typed Ctrl-C
CHECKPOINTS = "checkpoints"  # train.checkpoint.FOLDER, which is not imported: it needs torch
SUMMARY, REPORT = "summary.json", "report.html"
FINAL_STATUSES = {
    2: "exit status 2: its message says what to change",
    130: "Ctrl-C",
    143: "SIGTERM",
}


@dataclass(slots=True)
class CrashHistory:
    """Counts of the crashes so far. A count of crashes in a row starts again at 0."""

    checkpoint: int  # step of the newest checkpoint
    last_step: int | None = None  # of the last crash that was in a step
    furthest_step: int = 0
    in_step: int = 0
    stalled: int = 0
    unsaved: int = 0
    before_step: int = 0
    wait_s: float = 0.0  # before the next restart

    def record(self, step: int | None, checkpoint: int) -> None:
        """Add a crash.

        step: None if the process began none. checkpoint: step of the newest one, 0 if there is
        none.
        """
        has_new_checkpoint = checkpoint > self.checkpoint
        progressed = has_new_checkpoint or (step is not None and step > self.furthest_step)
        if progressed or not self.wait_s:
            self.wait_s = FIRST_WAIT_S
        else:
            self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S)
        self.checkpoint = max(checkpoint, self.checkpoint)
        if step is None:
            self.before_step += 1
            return
        self.before_step = 0
        if step != self.last_step:
            self.in_step = 0
        self.in_step += 1
        self.stalled = 0 if progressed else self.stalled + 1
        self.unsaved = 0 if has_new_checkpoint else self.unsaved + 1
        self.last_step, self.furthest_step = step, max(step, self.furthest_step)

    def reason_to_give_up(self) -> str | None:
        """Return the end of a sentence about the last crash; None to go on."""
        if self.in_step == MAX_CRASHES_IN_STEP:
            return f", where it has ended {self.in_step} times"
        if self.stalled == MAX_STALLED:
            return (
                f"; the last {self.stalled} restarts came no further than step {self.furthest_step}"
            )
        if self.unsaved == MAX_UNSAVED:
            return f"; the last {self.unsaved} starts left no new checkpoint (checkpoint.every)"
        if self.before_step == MAX_CRASHES_BEFORE_STEP:
            return f", {self.before_step} times in a row"
        return None


def supervise(
    out: Path,
    first: list[str],
    resume: list[str],
    restarts: int,
    log: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Run the command `first`, and after every crash `resume`, at most `restarts` times.

    Return the last exit status. out: the run's folder. If a crashed run has not made it yet,
    `first` is run again.
    """
    history = CrashHistory(newest_checkpoint(out))
    status = 1
    for restart in range(restarts + 1):
        has_folder = (out / CONFIG).exists()
        if has_folder:
            with suppress(OSError):
                (out / BEGUN).unlink(missing_ok=True)
        command = resume if restart and has_folder else first
        before = _summary_time(out)
        status = _run_command([sys.executable, "-P", "-m", "onepolicy", *command])
        if status == 0:
            return 0
        if status in FINAL_STATUSES:
            log(f"{out}: ended by {FINAL_STATUSES[status]}; not restarted")
            return status
        if _summary_time(out) not in (None, before) and _is_complete(out):
            log(f"{out}: ended by {describe_status(status)} after its summary; it has finished")
            return 0
        step = step_begun(out)
        history.record(step, newest_checkpoint(out))
        where = "before any step" if step is None else f"in step {step}"
        crash = f"{out}: ended by {describe_status(status)} {where}"
        reason = history.reason_to_give_up()
        if reason is not None:
            log(f"{crash}{reason}; not restarted")
            break
        if restart == restarts:
            log(f"{crash}; all {restarts} restarts are used up (--restarts)")
            break
        log(f"{crash}; restart {restart + 1} of {restarts} in {history.wait_s:g} s")
        pause(history.wait_s)
    return max(status, 1)


def _summary_time(out: Path) -> int | None:
    """Return when the run's summary was written [ns]; None if there is none."""
    try:
        return (out / SUMMARY).stat().st_mtime_ns
    except OSError:
        return None


def _is_complete(out: Path) -> bool:
    """Return whether the run has its last checkpoint, and the report that its settings ask for."""
    try:
        config = json.loads((out / CONFIG).read_bytes())
        steps, reports = config["steps"], config["log"]["report"]
        return newest_checkpoint(out) >= steps and ((out / REPORT).exists() or not reports)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def step_begun(out: Path) -> int | None:
    """Return the step, from 1, that the run's process was in.

    Return None if it had begun none, or if its file cannot be read.
    """
    try:
        text = (out / BEGUN).read_bytes().strip()
    except OSError:
        return None
    if not re.fullmatch(rb"[1-9][0-9]{0,17}", text):
        return None
    return int(text)


def newest_checkpoint(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    try:
        names = os.listdir(out / CHECKPOINTS)
    except OSError:
        return 0
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step_[0-9]{1,18}", name)]
    return max(steps, default=0)


def _run_command(command: list[str]) -> int:
    """Run a command and return its exit status; -N if signal N ended it.

    SIGTERM and SIGINT are passed on to it. After signal N the status is 128 + N, unless the command
    succeeds.
    """
    signals: list[int] = []  # received by this process
    process = None

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        # A terminal sends Ctrl-C to the process as well, so that is not repeated.
        if process is not None and (number != signal.SIGINT or not _in_foreground()):
            process.send_signal(number)

    with _signal_handlers(pass_on):
        process = subprocess.Popen(command)
        if signals:  # received before there was a process to pass it on to
            process.send_signal(signals[0])
        status = _wait(process, signals)
    if signals and status:
        return 128 + signals[-1]
    return status


def _wait(process: subprocess.Popen[bytes], signals: list[int]) -> int:
    """Wait for the process and return its exit status.

    Append every SIGINT to `signals` and pass it on. SIGINT is received by sigtimedwait, because
    only that tells a typed Ctrl-C from a signal of another process.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN or not hasattr(signal, "sigtimedwait"):
        return process.wait()
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        while (status := process.poll()) is None:
            received = signal.sigtimedwait({signal.SIGINT}, POLL_S)
            if received is not None:
                signals.append(signal.SIGINT)
                if received.si_code != FROM_KERNEL:  # a terminal sends it to the process as well
                    process.send_signal(signal.SIGINT)
        return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def _signal_handlers(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle SIGTERM and SIGINT, unless this process ignores them."""
    previous = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def _in_foreground() -> bool:
    """Return whether a Ctrl-C typed at the terminal reaches this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def describe_status(status: int) -> str:
    """Return `exit status N`, or the name of the signal that ended a process."""
    if status == ServiceUnavailable.EXIT:
        return f"exit status {status}: what it needs is not there (yet)"
    if status < 0:
        return signal.Signals(-status).name
    return f"exit status {status}"
