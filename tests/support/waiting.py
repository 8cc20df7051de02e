"""Waiting for a condition instead of for a time, with one limit for everything that surely comes.

No test may depend on the machine's speed. A test that needs an event waits until the event has
happened. LIMIT_S is far beyond the time that it takes, and grows with the machine's load: it ends a
test that would hang, and decides nothing else.
"""

import asyncio
import os
import time

LIMIT_S = 120.0
POLL_S = 0.005  # between two looks


def patience(limit):
    """Return a limit in seconds as long as this machine's load makes it: runnable processes a core,
    over the last minute."""
    return limit * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition, limit=LIMIT_S, *, process=None, poll=POLL_S):
    """Return the first true value of `condition()`. Fail after `limit` seconds of an idle machine,
    or when `process` has ended before."""
    start = time.monotonic()
    while not (found := condition()):
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < start + patience(limit), f"not within {patience(limit):g} s"
        time.sleep(poll)
    return found


async def until(condition, limit=LIMIT_S):
    """Wait as `wait_until` does, on an event loop that runs meanwhile."""
    start = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < start + patience(limit), f"not within {patience(limit):g} s"
        await asyncio.sleep(POLL_S / 5)
    return found
