"""A trial of benchmarks/mutants.py: pytest in a fork, with a limit, and which tests pass."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_SECONDS = 60.0
LOG = "mutant-log.txt"  # of the last trial in a copy of the tree


class Passing:
    """Tests that pass in a tree without a mutant; each is tried once.

    failing: returns which of some tests do not.
    """

    def __init__(self, failing: Callable[[list[str]], set[str]]):
        self.failing = failing
        self.passes: dict[str, bool] = {}

    def of(self, tests: list[str]) -> list[str]:
        """Return those of the tests that pass."""
        unknown = [test for test in tests if test not in self.passes]
        if unknown:
            failed = self.failing(unknown)
            self.passes |= {test: test not in failed for test in unknown}
        return [test for test in tests if self.passes[test]]


class Reporter:
    """Plugin of a trial: writes the names of the tests that fail into a file."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def failing(tree: Path, tests: list[str], words: list[str]) -> set[str]:
    """Return which tests fail in a tree; all, if the trial does not come to its end."""
    failed = tree / "mutant-failed.txt"
    failed.write_text("")
    status = trial(tree, tests, words, Reporter(failed))
    if status in (0, 1):
        return set(failed.read_text(encoding="utf-8").splitlines())
    return set(tests)


def trial(tree: Path, tests: list[str], words: list[str], *plugins: Reporter) -> int | None:
    """Run tests of a tree. Return pytest's status, None if the time was up."""
    ids = tree / "mutant-tests.txt"
    ids.write_text("\n".join(tests))
    options = [*words, "-rfE", "-p", "no:cacheprovider", f"@{ids}"]
    return in_fork(tree, options, tree / LOG, plugins)


def in_fork(tree: Path, words: list[str], log: Path, plugins: Sequence[object] = ()) -> int | None:
    """Run pytest in a fork. Return its status, None if the time was up."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src")]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        sys.stdout.flush()
        os._exit(int(pytest.main(words, plugins=plugins)))
    end = time.monotonic() + 3 * MOST_SECONDS
    while time.monotonic() < end and cpu_seconds(child) < MOST_SECONDS:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            _kill(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _kill(child)
    os.waitpid(child, 0)
    return None


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process and of those that it started and that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
