"""The tests marked gpu, each printed and stored as it ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from gpu.harness import ROOT, Bench

MARKED = "gpu and not vllm and not sglang"
FILES = (
    "tests/integration/gpu",
    "tests/integration/test_cuda.py",
    "tests/integration/models/quant/test_quant_cuda.py",
    "tests/integration/invariant/test_on_policy.py",
)
"""The files with such tests. Others may import packages that an image for GPUs lacks."""
TINY = ("tests/integration/gpu/test_attention_kernels.py",)


class Recorder:
    """A plugin of pytest that records every test and stops when the time is over."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._record(report, seconds=round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._record(report)

    def _record(self, report: Any, **values: Any) -> None:
        self.outcomes[report.outcome] += 1
        if report.failed:
            values["error"] = report.longreprtext[-2000:]
        if report.skipped and isinstance(report.longrepr, tuple):
            values["reason"] = report.longrepr[2]
        name = report.nodeid.removeprefix("tests/")
        self.bench.record(name, outcome=report.outcome, **values)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.bench.seconds_left < 0:
            pytest.skip(f"{self.bench.limit:.0f} s are over")


def main(bench: Bench) -> int:
    """Run the tests. Return pytest's exit status."""
    files, marked = FILES, MARKED
    if bench.tiny:
        files, marked = TINY, "not gpu"
    options = ["-o", "addopts=--strict-markers --import-mode=importlib"]
    options += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:xdist"]
    arguments = [*options, "-m", marked, "--rootdir", str(ROOT)]
    recorder = Recorder(bench)
    status = pytest.main([*arguments, *(str(ROOT / file) for file in files)], plugins=[recorder])
    bench.record("all", status=int(status), **recorder.outcomes)
    return int(status)
