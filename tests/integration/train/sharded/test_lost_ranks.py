"""A rank that stands still or fails alone, in processes without a model: who ends, and who is
named."""

import os
import re
import signal
import subprocess
import sys

import pytest

from onepolicy.launch.agent import on_loopback, rank_variables
from support.own_processes import start_process
from support.waiting import patience, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
LIMIT, LONG = int(patience(5)), 300  # s
RANK_0 = f"""
import sys, time
import torch, torch.distributed as dist
from onepolicy.config import resolve
from onepolicy.launch.ranks import joined_ranks

base = {{"out": "x", "steps": 1, "model": {{"path": "m"}}, "task": {{"kind": "chain"}}}}
how = ["train.ranks=2", "train.rank_timeout={LIMIT}", "train.device=cpu"]
try:
    with joined_ranks(resolve(base, how)) as ranks:
        with ranks.everywhere("build"):
            pass
        print("sampling", flush=True)
        if sys.argv[1] == "samples":
            time.sleep({3 * LIMIT})
        with ranks.everywhere(sys.argv[1]):
            if sys.argv[1] == "raises":
                raise ValueError("rank 0 alone")
            dist.all_reduce(torch.ones(1))
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
    sys.stdin.read()  # this process, which has the connections, stays
else:
    print("done", flush=True)
"""
RANK_1 = """
import sys
import torch, torch.distributed as dist
from onepolicy.launch import ranks


class Learner:
    def repeat(self, call):
        if call.name == "memory":
            raise MemoryError("no room for 9 GiB")
        dist.all_reduce(torch.ones(1))


ranks.REPORT_S = 1.0
ranks._build_learner = lambda call, ranks: Learner()
sys.exit(ranks.run_launched_rank())
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts both ranks and returns them when rank 0 samples."""
    started = []
    shared = os.environ | rank_variables(str(tmp_path), 1) | on_loopback() | {"WORLD_SIZE": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}

    def start_both(mode):
        for rank, program in enumerate((RANK_0, RANK_1)):
            command = [sys.executable, "-c", program, mode]
            env = shared | {"RANK": str(rank)}
            started.append(start_process(command, env=env, text=True, **pipes))
        assert started[0].stdout.readline() == "sampling\n"
        return started

    yield start_both
    for each in started:
        each.kill()
        each.communicate()


def test_a_rank_0_that_stops_while_it_samples_is_named_within_the_limit(start):
    first, second = start("never")
    os.kill(first.pid, signal.SIGSTOP)
    said, _ = second.communicate(timeout=LONG)
    assert second.returncode == 1
    words = rf"TrainingError: rank 1 \(process \d+ on .*no answer from rank 0 \(process {first.pid}"
    assert re.search(words, said), said
    assert f"train.rank_timeout is {LIMIT} s" in said


def test_a_rank_that_stops_while_rank_0_samples_is_named_by_the_next_call(start):
    first, second = start("samples")
    os.kill(second.pid, signal.SIGSTOP)
    said = first.stdout.readline()
    assert re.search(rf"TrainingError: .*no answer from rank 1 \(process {second.pid} on", said), (
        said
    )


def test_a_rank_0_that_samples_for_longer_than_the_limit_is_waited_for(start):
    first, second = start("samples")
    assert first.stdout.readline() == "done\n"
    assert second.wait(LONG) == 0


def test_a_rank_that_alone_runs_out_of_memory_is_named_by_rank_0(start):
    first, second = start("memory")
    said = first.stdout.readline()
    assert f"rank 1 (process {second.pid} on " in said
    assert "): MemoryError: no room for 9 GiB; `--resume`" in said
    assert "no room for 9 GiB" in second.communicate(timeout=LONG)[0]


def test_ranks_end_by_themselves_after_a_rank_0_that_failed_alone_and_lives(start):
    first, second = start("raises")
    assert first.stdout.readline() == "ValueError: rank 0 alone\n"
    wait_until(lambda: second.poll() is not None, LONG)
    assert second.returncode == -signal.SIGTERM
    assert first.poll() is None
