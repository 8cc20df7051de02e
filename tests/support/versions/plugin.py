"""A pytest plugin of a version cell: it skips by name, with the reason, what the cell's versions
lack, and writes the results as JSON.

`python -m pytest -p support.versions.plugin --tests KIND --results FILE ...`
"""

from __future__ import annotations

import fnmatch
import json
import platform
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

SKIPS = Path(__file__).with_name("skips.toml")
PACKAGES = ("torch", "transformers", "numpy", "pydantic")
PROBE = "tests/integration/replay/test_versions.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tests", required=True)
    parser.addoption("--results", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Cell(config.getoption("--tests"), config.getoption("--results")))


class Cell:
    def __init__(self, tests: str, results: Path | None) -> None:
        self._tests, self._results = tests, results
        rows = tomllib.loads(SKIPS.read_text(encoding="utf-8"))["skip"]
        self._skips = [row for row in rows if any(map(_is_installed, row["where"]))]
        self._outcomes: dict[str, tuple[str, str]] = {}  # test -> outcome, reason of a skip

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for row in self._skips:
                if any(fnmatch.fnmatchcase(item.nodeid, _literal(test)) for test in row["tests"]):
                    item.add_marker(pytest.mark.skip(reason=row["reason"]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self._outcomes.get(report.nodeid, ("passed", ""))
        if report.outcome == "passed" or before[0] == "failed":
            self._outcomes.setdefault(report.nodeid, ("passed", ""))
            return
        reason = ""
        if report.skipped:
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        self._outcomes[report.nodeid] = (report.outcome, reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = ("failed", "")

    def pytest_sessionfinish(self) -> None:
        if self._results is not None:
            text = json.dumps(self.results(), indent=1, ensure_ascii=False)
            self._results.write_text(text + "\n", encoding="utf-8")

    def results(self) -> dict[str, Any]:
        """Return what ran on which versions, and each family's state in the probe."""
        outcomes = Counter(outcome for outcome, _ in self._outcomes.values())
        skipped = Counter(reason for outcome, reason in self._outcomes.values() if reason)
        return {
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
            "tests": self._tests,
            "passed": outcomes["passed"],
            "failed": sorted(name for name, (got, _) in self._outcomes.items() if got == "failed"),
            "skipped": dict(sorted(skipped.items())),
            "families": self._families(),
        }

    def _families(self) -> dict[str, str]:
        """Return family -> "ok", the reason why it was skipped, or FAILED."""
        from integration.replay.test_versions import FAMILIES

        states = {}
        for family in FAMILIES:
            found = {
                outcome
                for name, outcome in self._outcomes.items()
                if name.startswith(PROBE) and f"[{family}" in name
            }
            if any(outcome == "failed" for outcome, _ in found):
                states[family] = "FAILED"
            else:
                states[family] = next((reason for _, reason in found if reason), "ok")
        return states


def _is_installed(requirement: str) -> bool:
    """Return whether `transformers<5` holds here."""
    wanted = Requirement(requirement)
    return wanted.specifier.contains(version(wanted.name).partition("+")[0], prereleases=True)


def _literal(test: str) -> str:
    """Return the pattern with its brackets, which name a test's parameters, as they are."""
    return test.replace("[", "[[]")
