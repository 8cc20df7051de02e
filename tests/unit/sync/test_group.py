"""Work in a daemon thread whose caller has given it up."""

import asyncio
import threading

import pytest

from onepolicy.sync.group import run_in_daemon_thread, start_in_daemon_thread
from support.waiting import LIMIT_S, wait_until


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_nobody_waits_for_any_more_ends_in_silence(fails, monkeypatch):
    """As after Ctrl-C, or when a weight update was given up."""
    problems, thread, goes_on = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", problems.append)

    def work():
        thread.append(threading.current_thread())
        goes_on.wait(LIMIT_S)
        if fails:
            raise RuntimeError("Connection closed by peer")

    async def give_up():
        waiting = asyncio.ensure_future(run_in_daemon_thread(work))
        while not thread:
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    goes_on.set()
    wait_until(lambda: not thread[0].is_alive())
    assert problems == []


def test_a_result_and_an_error_come_back():
    def fails():
        raise KeyError("w")

    assert start_in_daemon_thread(lambda: 7).result(LIMIT_S) == 7
    with pytest.raises(KeyError, match="w"):
        start_in_daemon_thread(fails).result(LIMIT_S)
