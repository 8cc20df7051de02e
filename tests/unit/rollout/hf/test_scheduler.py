"""The runner of a batch in this process."""

import asyncio
from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest

from onepolicy.rollout.hf.scheduler import BatchRunner
from onepolicy.types import Sampling


class BrokenBatch:
    """A batch whose device is lost in a step: it cannot be emptied either."""

    busy = False

    def step_context(self):
        return nullcontext()

    def admit(self, waiting: deque):
        pass

    def step(self, version):
        raise RuntimeError("illegal memory access")

    def clear(self):
        raise RuntimeError("the device is gone")


def test_requests_end_with_the_error_of_a_step_although_the_batch_cannot_be_emptied():
    async def requests():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # of clear()
        runner = BatchRunner(BrokenBatch())
        asked = [
            asyncio.create_task(runner.run_request(np.ones(2, np.int64), Sampling(1.0, 4), i, 0))
            for i in range(3)
        ]
        for _ in range(20):  # turns of the loop
            await asyncio.sleep(0)
        assert all(each.done() for each in asked)
        for each in asked:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                await each

    asyncio.run(requests())
