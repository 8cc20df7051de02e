"""`onepolicy train --restarts N`: a run in a process of its own, resumed from its newest checkpoint when it dies.

Exit 2 (a setting, a damaged file), Ctrl-C and SIGTERM are never answered with a restart, nor is a run that ends in the
same step again and again or gets no further. Whatever ends the supervision is said.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepolicy.config import NotThere
from onepolicy.config.stored import BEGUN, CONFIG

SAME_STEP = 3  # ends in one step, after which it is the step's fault
STALLED = 6  # ends in a row, in whatever steps, of which none got further than any before, nor left a checkpoint
UNSAVED = 20  # ends in a row, each further than the one before, without a checkpoint: all of them begin at the same
STARTS = 10  # ends in a row before any step: their waits alone take 4 minutes
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # s, before a restart; doubled until another step is begun
POLL_S = 0.1  # s, between two looks at whether the process has ended
FROM_KERNEL = 0x80  # si_code of a signal that nobody sent by `kill`: what is typed at a terminal
CHECKPOINTS = "checkpoints"  # train.checkpoint.FOLDER, which is not imported: it needs torch
FINAL = {2: "exit status 2: its message says what to change", 130: "Ctrl-C", 143: "SIGTERM"}


def supervise(
    out: Path,
    first: list[str],
    resume: list[str],
    restarts: int,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Run the command `first`, and after every crash `resume`, at most `restarts` times; the last exit status.

    out: the run's folder. Where there is none yet, `first` is what is started again.
    """
    last: int | None = None
    furthest, saved = 0, newest_checkpoint(out)
    ends = stalled = unsaved = starts = 0
    wait, status = 0.0, 1
    for restart in range(restarts + 1):
        if there := (out / CONFIG).exists():
            with suppress(OSError):
                (out / BEGUN).unlink(missing_ok=True)
        status = _run(
            [sys.executable, "-m", "onepolicy", *(resume if restart and there else first)]
        )
        if status == 0:
            return 0
        if status in FINAL:
            say(f"{out}: ended by {FINAL[status]}; not restarted")
            return status
        step, checkpoint = step_begun(out), newest_checkpoint(out)
        kept = checkpoint > saved
        further = kept or (step is not None and step > furthest)
        wait = FIRST_WAIT if further or not wait else min(2 * wait, LONGEST_WAIT)
        starts = starts + 1 if step is None else 0
        if step is not None:
            ends = ends + 1 if step == last else 1
            stalled = 0 if further else stalled + 1
            unsaved = 0 if kept else unsaved + 1
            last, furthest = step, max(step, furthest)
        saved = max(checkpoint, saved)
        what = f"{out}: ended by {_words(status)} {'before any step' if step is None else f'in step {step}'}"
        if ends == SAME_STEP and step is not None:
            say(f"{what}, where it has ended {ends} times; not restarted")
            break
        if stalled == STALLED:
            say(
                f"{what}; the last {stalled} restarts came no further than step {furthest}; not restarted"
            )
            break
        if unsaved == UNSAVED:
            say(
                f"{what}; the last {unsaved} starts left no new checkpoint (checkpoint.every); not restarted"
            )
            break
        if starts == STARTS:
            say(f"{what}, {starts} times in a row; not restarted")
            break
        if restart == restarts:
            say(f"{what}; all {restarts} restarts are used up (--restarts)")
            break
        say(f"{what}; restart {restart + 1} of {restarts} in {wait:g} s")
        pause(wait)
    return max(status, 1)


def step_begun(out: Path) -> int | None:
    """The step, from 1, that the run's process was in; None if it had begun none, or the file does not say."""
    try:
        text = (out / BEGUN).read_bytes()
    except OSError:
        return None
    return int(text) if re.fullmatch(rb"[1-9][0-9]{0,17}", text.strip()) else None


def newest_checkpoint(out: Path) -> int:
    """Its step; 0 if there is none."""
    try:
        names = os.listdir(out / CHECKPOINTS)
    except OSError:
        return 0
    return max(
        (int(name[5:]) for name in names if re.fullmatch(r"step_[0-9]{1,18}", name)), default=0
    )


def _run(command: list[str]) -> int:
    """Its exit status, negative: the signal that ended it. SIGTERM and SIGINT are passed on; after one of them the
    status is 128 and its number, unless the command has finished."""
    came: list[int] = []
    process = None

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        # A terminal sends Ctrl-C to the process as well, so that is not repeated.
        if process is not None and (number != signal.SIGINT or not _in_foreground()):
            process.send_signal(number)

    with _heeded(pass_on):
        process = subprocess.Popen(command)
        if came:  # before there was a process to take it
            process.send_signal(came[0])
        status = _wait(process, came)
    return 128 + came[-1] if came and status else status


def _wait(process: subprocess.Popen[bytes], came: list[int]) -> int:
    """Its exit status. SIGINT is taken here and not by a handler, because only so it says where it came from."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN or not hasattr(signal, "sigtimedwait"):
        return process.wait()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        while (status := process.poll()) is None:
            told = signal.sigtimedwait({signal.SIGINT}, POLL_S)
            if told is not None:
                came.append(signal.SIGINT)
                if told.si_code != FROM_KERNEL:  # a terminal sends it to the process as well
                    process.send_signal(signal.SIGINT)
        return status
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _heeded(pass_on: Callable[[int, object], None]) -> Iterator[None]:
    heeded = [
        each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, pass_on) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether this process is one of those that get what is typed at a terminal."""
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


def _words(status: int) -> str:
    if status == NotThere.EXIT:
        return f"exit status {status}: what it needs is not there (yet)"
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
