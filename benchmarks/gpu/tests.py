"""The tests marked gpu, a case for every file, each test recorded as it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gpu.harness import ROOT, Bench

MARKED = "gpu and not vllm and not sglang"


class Recorder:
    """A plugin of pytest that records every test and skips what finds no time."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._record(report, seconds=round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._record(report)

    def _record(self, report: Any, **values: Any) -> None:
        if report.failed:
            values["error"] = report.longreprtext[-2000:]
        if report.skipped and isinstance(report.longrepr, tuple):
            values["reason"] = report.longrepr[2]
        name = report.nodeid.removeprefix("tests/")
        self.bench.record(name, outcome=report.outcome, **values)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.bench.seconds_left < 0:
            self.bench.skipped += 1
            pytest.skip(f"{self.bench.limit:.0f} s are over")


def case_of(file: str, *, marked: bool = True) -> Callable[[Bench], None]:
    """Return a case that runs the tests of a file: on a GPU those marked gpu, or all of them.

    At toy shapes it runs those of the CPU.
    """
    return partial(run_file, file, marked)


def run_file(file: str, marked: bool, bench: Bench) -> None:
    options = ["-o", "addopts=--strict-markers --import-mode=importlib"]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal"]
    options += ["-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin"]
    if marked:
        options += ["-m", "not gpu and not slow" if bench.tiny else MARKED]
    arguments = [*options, "--rootdir", str(ROOT), str(ROOT / file)]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # an image has plugins of its own
    status = int(pytest.main(arguments, plugins=[Recorder(bench)]))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not (
        bench.tiny and status == pytest.ExitCode.NO_TESTS_COLLECTED
    ):
        bench.record("pytest", error=f"status {status}")
