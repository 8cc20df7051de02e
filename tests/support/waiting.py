"""Waiting for a condition instead of for a time, with one limit for everything that surely comes.

No test may depend on the machine's speed. A test that needs an event waits until the event has
happened. LIMIT_S is far beyond the time that a loaded machine takes: it ends a test that would
hang, and decides nothing else.
"""

import asyncio
import time

LIMIT_S = 120.0
POLL_S = 0.005  # between two looks


def wait_until(condition, limit=LIMIT_S, *, process=None, poll=POLL_S):
    """Return the first true value of `condition()`. Fail after `limit` seconds, or when `process`
    has ended before."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert process is None or process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end, f"it has not come to that within {limit:g} s"
        time.sleep(poll)
    return found


async def until(condition, limit=LIMIT_S):
    """Wait as `wait_until` does, on an event loop that runs meanwhile."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < end, f"it has not come to that within {limit:g} s"
        await asyncio.sleep(POLL_S / 5)
    return found
