"""Hooks of all tests: programs that a test needs, and random numbers that do not depend on test
order.

A test that drives a system program declares it: `@pytest.mark.needs("bwrap")`, or `need("bwrap")`
in its fixture. Where the program is missing, the test is skipped with the name of the package that
brings it. In CI (`CI=true`) nothing may be missing, so a skip fails there. Only a skip for the
processor or for a device (`MAY_LACK`) stays a skip.
"""

import os
import random
import signal
import sys

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")

from support.needs import need  # noqa: E402

MAY_LACK = ("this processor", "this system", "no CUDA device")


# A shell lets what it starts in the background ignore these, nohup the last. So would every process
# that a test starts.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Hypothesis would fail an example that takes longer than 200 ms.
settings.register_profile("onepolicy", deadline=None)
settings.load_profile("onepolicy")


def pytest_runtest_setup(item):
    """Seed the global random numbers, so that no test depends on the tests that ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    for mark in item.iter_markers("needs"):
        need(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _failed_in_ci((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail a whole file in CI that `pytest.importorskip` skips."""
    return _failed_in_ci((yield))


def _failed_in_ci(report):
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        path, line, said = report.longrepr
        reason = said.removeprefix("Skipped: ")
        if not reason.startswith(MAY_LACK):
            report.outcome = "failed"
            report.longrepr = (
                f"{path}:{line}: skipped in CI, where nothing may be missing: {reason}"
            )
    return report


@pytest.fixture
def no_waiting(monkeypatch):
    """Let retries come at once."""
    from onepolicy.rollout.servers import http

    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)
