"""A queue of cases, each in a process of its own with a time limit, and the file of their results.

The queue's process imports what all cases import and forks one process a case. So a case that
hangs, runs out of memory or breaks the GPU's context ends alone. The queue's process never touches
the GPU: a process that was forked from one that did could not use it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of prctl
TAIL = 2000  # characters of an error that are kept
POLL = 0.05  # seconds


@dataclass(frozen=True)
class Case:
    """One case of the queue.

    run: gets the Bench of the case. seconds: after which it is ended. alone: it times something or
    fills the memory, so that nothing may run beside it.
    """

    name: str
    run: Callable[[Any], object]
    seconds: float
    alone: bool = True


class Results:
    """The file results.jsonl of a folder: a row per lease, per result and per end of a case.

    Rows are appended by several processes, each by one write.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "results.jsonl"

    def add(self, **row: Any) -> None:
        line = json.dumps(row, default=str) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows."""
        if not self.path.exists():
            return []
        return parsed(self.path)

    def take_over(self, earlier: Path) -> None:
        """Begin with the rows of an earlier lease, whose folder or file this is.

        A line that was cut off is left out, so that the next row does not continue it.
        """
        path = earlier / "results.jsonl" if earlier.is_dir() else earlier
        if not path.exists():
            raise SystemExit(f"--resume {earlier}: no results.jsonl there")
        if path.resolve() == self.path.resolve():
            return
        if self.rows():
            raise SystemExit(f"--out {self.folder}: it has results of its own; give a new folder")
        for row in parsed(path):
            self.add(**row)

    def done(self, *, tiny: bool) -> set[str]:
        """Return the cases whose last run at these shapes was whole and without an error."""
        last: dict[str, str] = {}
        of_these_shapes = True
        for row in self.rows():
            if "lease" in row:
                of_these_shapes = row["tiny"] == tiny
            elif "ended" in row and of_these_shapes:
                last[row["case"]] = row["ended"]
        return {name for name, ended in last.items() if ended == "done"}


def parsed(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. A line that was cut off by a lost machine is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


@dataclass
class _Running:
    case: Case
    begun: float
    limit: float
    killed: bool = False


def run_queue(
    cases: Sequence[Case],
    results: Results,
    make_bench: Callable[[Case, float], Any],
    *,
    seconds: float,
    jobs: int = 1,
    clocks: Callable[[], str] = lambda: "",
) -> dict[str, str]:
    """Run the cases in their order. Return how each ended.

    seconds: for all of them; a case that finds less than its own limit gets what is left, and none
    begins after that. jobs: cases that are not alone, side by side. clocks: what it returns is kept
    with every case that ran alone.
    """
    end = time.monotonic() + seconds
    ended: dict[str, str] = {}
    running: dict[int, _Running] = {}
    waiting = list(cases)
    try:
        while waiting or running:
            while waiting and _may_begin(waiting[0], running, jobs):
                left = end - time.monotonic()
                if left <= 0:
                    ended |= {case.name: "not reached" for case in waiting}
                    waiting.clear()
                    break
                case = waiting.pop(0)
                limit = min(case.seconds, left)
                running[_fork(case, make_bench, results, limit)] = _Running(
                    case, time.monotonic(), limit
                )
            for pid, how in _ended(running):
                run = running.pop(pid)
                took = time.monotonic() - run.begun
                ended[run.case.name] = how
                extra = {"clocks": clocks()} if run.case.alone else {}
                results.add(case=run.case.name, ended=how, seconds=round(took, 1), **extra)
                print(f"--- {run.case.name}: {how}, {took:.0f} s", flush=True)
            time.sleep(POLL)
    finally:
        for pid in running:
            _kill(pid)
    return ended


def _may_begin(case: Case, running: dict[int, _Running], jobs: int) -> bool:
    if not running:
        return True
    return (
        not case.alone and len(running) < jobs and not any(r.case.alone for r in running.values())
    )


def _fork(case: Case, make_bench: Callable, results: Results, limit: float) -> int:
    """Start a case in a process of its own and return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a queue that is killed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(results.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        bench = make_bench(case, limit)
        case.run(bench)
        status = 0
        if bench.errors:
            status = 3
        elif bench.skipped:
            status = 4
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        results.add(case=case.name, name="error", error=text[-TAIL:])
        print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)  # threads of a case that failed would keep it alive


def _ended(running: dict[int, _Running]) -> list[tuple[int, str]]:
    """Return the processes that have ended and how. End those whose time is over."""
    found = []
    for pid, run in running.items():
        if time.monotonic() - run.begun > run.limit and not run.killed:
            run.killed = True
            _kill(pid)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, _word(status, run)))
            _kill(pid, group_only=True)  # what it has started and left
    return found


def _word(status: int, run: _Running) -> str:
    if run.killed:
        return f"ended after its {run.limit:.0f} s"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"killed by {name}" + (" (host memory?)" if name == "SIGKILL" else "")
    words = {0: "done", 3: "done, with errors", 4: "done in part, for lack of time"}
    return words.get(os.waitstatus_to_exitcode(status), "failed")


def _kill(pid: int, *, group_only: bool = False) -> None:
    kills = [os.killpg]
    if not group_only:  # before setsid it has no group of its own
        kills.append(os.kill)
    for kill in kills:
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
