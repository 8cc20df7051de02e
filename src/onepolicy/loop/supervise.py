"""`onepolicy train --restarts N`: a run in a process of its own, resumed from its newest checkpoint when it dies.

Exit 2 (a setting, a damaged file), Ctrl-C and SIGTERM are never answered with a restart, nor is a run that ends in the
same step again and again. Whatever ends the supervision is said.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from onepolicy.config import NotThere
from onepolicy.config.stored import CONFIG

BEGUN = ".step"  # in the run's folder: the step that its process began last
SAME_STEP = 3  # ends in one step, after which it is the step's fault
STARTS = 10  # ends in a row before any step: their waits alone take 4 minutes
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # s, before a restart; doubled until another step is begun
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
    ends = starts = 0
    wait, status = 0.0, 1
    for restart in range(restarts + 1):
        if there := (out / CONFIG).exists():
            (out / BEGUN).unlink(missing_ok=True)
        status = _run([sys.executable, "-m", "onepolicy.cli", *(resume if restart and there else first)])
        if status == 0:
            return 0
        if status in FINAL:
            say(f"{out}: ended by {FINAL[status]}; not restarted")
            return status
        step = step_begun(out)
        further = step is not None and step != last
        wait = FIRST_WAIT if further or not wait else min(2 * wait, LONGEST_WAIT)
        starts = starts + 1 if step is None else 0
        if step is not None:
            ends, last = (1 if further else ends + 1), step
        what = f"{out}: ended by {_words(status)} {'before any step' if step is None else f'in step {step}'}"
        if ends == SAME_STEP and step is not None:
            say(f"{what}, where it has ended {ends} times; not restarted")
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
    """The step, from 1, that the run's process was in; None if it had begun none."""
    try:
        return int((out / BEGUN).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None


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
        status = process.wait()
    return 128 + came[-1] if came and status else status


@contextmanager
def _heeded(pass_on: Callable[[int, object], None]) -> Iterator[None]:
    heeded = [each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) != signal.SIG_IGN]
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
