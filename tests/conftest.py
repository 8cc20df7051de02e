"""Hooks of all tests: what `make test` runs of them, programs that a test needs, the lane of tests
that start processes, and random numbers that do not depend on test order.

A test that drives a system program declares it: `@pytest.mark.needs("bwrap")`, or `need("bwrap")`
in its fixture. Where the program is missing, the test is skipped with the name of the package that
brings it. In CI (`CI=true`) nothing may be missing, so a skip fails there. Only a skip for the
processor or for a device (`MAY_LACK`) stays a skip.
"""

import gc
import os
import random
import signal
import sys
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("support")

from support import gate, processes  # noqa: E402
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

# Hypothesis would fail an example that takes longer than 200 ms. `make test` draws the same
# examples every time; elsewhere they are new ones, and a failure prints the one to add.
settings.register_profile("all", deadline=None, print_blob=True)
settings.register_profile("gate", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("check", settings.get_profile("gate"), max_examples=5)


def pytest_addoption(parser):
    parser.addoption(
        "--gate", action="store_true", help="run what `make test` runs (support/gate.py)"
    )
    parser.addoption(
        "--order", type=int, metavar="SEED", help="shuffle the files, and the tests in each"
    )


def pytest_configure(config):
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("gate" if config.getoption("--gate") else "all")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gate"):
        table = Path(__file__).parent / "support" / "families.toml"
        kept = gate.selected(items, tomllib.loads(table.read_text(encoding="utf-8")))
        left_out = set(items).difference(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
    if (seed := config.getoption("--order")) is not None:
        places = {item: random.Random(f"{seed} {item.nodeid}").random() for item in items}
        files = {item.path: random.Random(f"{seed} {item.path}").random() for item in items}
        items.sort(key=lambda item: (files[item.path], places[item]))


def pytest_collection_finish():
    """Leave a million objects of torch and transformers out of later collections of garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Seed the global random numbers, so that no test depends on the tests that ran before it."""
    random.seed(0)
    for module, seed in (("torch", "manual_seed"), ("numpy", "random.seed")):
        if module in sys.modules:
            attrgetter(seed)(sys.modules[module])(0)
    for mark in item.iter_markers("needs"):
        need(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with processes.watch(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = _failed_in_ci((yield))
    if call.when == "call" and report.passed and (started := processes.unmarked(item)):
        report.outcome = "failed"
        report.longrepr = f"mark it `process`, it starts one: {started}"
    return report


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


@pytest.fixture(autouse=True)
def _tasks_in_this_process(request, monkeypatch):
    """Let tests that start no processes read dumps and render templates in their own."""
    if "process" not in request.keywords:
        monkeypatch.setattr("onepolicy.bounded.stream", processes.run_task)
        monkeypatch.setattr("onepolicy.bounded.ask", processes.answer_task)


@pytest.fixture
def no_waiting(monkeypatch):
    """Let retries come at once."""
    from onepolicy.rollout.remote import client as http

    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)
