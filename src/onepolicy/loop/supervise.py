"""`onepolicy train --restarts N`: a run in a process of its own, resumed from its newest checkpoint when it dies.

Exit 2 (a setting, a damaged file) and Ctrl-C are never answered with a restart, nor is a run that ends at the same step
again and again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onepolicy.config import UsageError
from onepolicy.config.stored import CONFIG
from onepolicy.report.jsonl import read_jsonl

SAME_STEP = 3  # ends at one step, after which it is the step's fault
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # s, before a restart; doubled while no step was added
STOPPED = 143  # by SIGTERM
FINAL = (0, 2, 130, STOPPED)  # exit statuses that no restart follows: finished, UsageError, Ctrl-C


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
    ends, wait, status = 0, FIRST_WAIT, 1
    for restart in range(restarts + 1):
        begun = (out / CONFIG).exists()
        status = _run([sys.executable, "-m", "onepolicy.cli", *(resume if restart and begun else first)])
        if status in FINAL:
            return status
        step = last_step(out)
        ends, wait = (ends + 1, min(2 * wait, LONGEST_WAIT)) if step == last else (1, FIRST_WAIT)
        last, what = step, f"{out}: ended by {_words(status)} after step {step}"
        if ends == SAME_STEP:
            say(f"{what}, where it has ended {ends} times in a row; not restarted")
            break
        if restart == restarts:
            say(f"{what}; all {restarts} restarts are used up (--restarts)")
            break
        say(f"{what}; restart {restart + 1} of {restarts} in {wait:g} s")
        pause(wait)
    return max(status, 1)


def last_step(out: Path) -> int:
    """The newest step in the run's log, in a checkpoint or not; 0 before the first."""
    path = out / "metrics.jsonl"
    try:
        rows = read_jsonl(path) if path.exists() else []
    except UsageError:
        return 0  # the run says itself what is wrong with it
    return max((row["step"] for row in rows), default=0)


def _run(command: list[str]) -> int:
    """Its exit status, negative: the signal that ended it. SIGTERM is passed on and ends the supervision too."""
    process, stopped = subprocess.Popen(command), False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            try:
                status = process.wait()
                return STOPPED if stopped else status
            except KeyboardInterrupt:
                continue  # the terminal has told the run as well, which ends now
    finally:
        signal.signal(signal.SIGTERM, before)


def _words(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
