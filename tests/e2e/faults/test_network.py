"""The network between two learner ranks stalls: nothing is refused, nothing arrives.

Under torchrun, with one rank in a network namespace whose link is taken down.
"""

import os
import signal
import socket
import sys
from contextlib import suppress

import pytest

from support.faulty_runs import (
    FAR_LINK,
    LINK,
    LONG,
    NEAR,
    SPACE,
    Fault,
    assert_complete,
    assert_same_run,
    ip,
    steps_of,
    wait_for,
)
from support.own_processes import children_of, gone, start_process

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(3600)]


def node(rank, port, recipe, out, log):
    """Start torchrun on one of two nodes. The far node is rank 1."""
    there = ["ip", "netns", "exec", SPACE] if rank else []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [f"--node-rank={rank}", f"--master-addr={NEAR}", f"--master-port={port}"]
    train = ["-m", "onepolicy", "train", recipe, f"out={out}", "train.ranks=2"]
    command = [*there, *torchrun, *train, "train.rank_timeout=40"]
    own = {"GLOO_SOCKET_IFNAME": FAR_LINK if rank else LINK, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return start_process(command, env=os.environ | own, stdout=file, stderr=file)


def test_a_stalled_network_ends_both_ranks_in_time(network, recipe, whole_on_ranks, tmp_path):
    if not network:
        pytest.skip("a network namespace and a veth need root, CAP_NET_ADMIN and iproute2")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    out, logs = tmp_path / "run", [tmp_path / "near.log", tmp_path / "far.log"]
    nodes = [node(rank, port, recipe, out, log) for rank, log in enumerate(logs)]
    try:
        wait_for(lambda: len(steps_of(out)) >= 3 or nodes[0].poll() is not None)
        assert nodes[0].poll() is None, logs[0].read_text()
        workers = [pid for each in nodes for pid in children_of(each.pid)]
        assert len(workers) == 2
        ip("link", "set", LINK, "down")
        fault = Fault(out)
        wait_for(lambda: all(map(gone, workers)), poll=0.1)
        fault.ended()
    finally:
        for each in nodes:  # torchrun's agents wait for each other
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait(LONG)
        ip("link", "set", LINK, "up", check=False)
    errors = logs[0].read_text()
    assert "onepolicy: " in errors
    assert "train.rank_timeout" in errors or "the ranks cannot go on together" in errors
    fault.resumed()
    assert_complete(out, 6)
    assert_same_run(whole_on_ranks, out, 6)
