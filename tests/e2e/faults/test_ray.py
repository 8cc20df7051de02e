"""Runs under Ray whose processes are killed or stopped from outside: each equals an undisturbed
run."""

import os
import re
import signal
import socket
import sys
import time
from importlib.util import find_spec
from subprocess import DEVNULL

import pytest

from onepolicy.cli import main
from support.faulty_runs import (
    LONG,
    assert_complete,
    assert_same_run,
    finished,
    rows,
    start,
    steps_of,
    timeless,
    wait_for,
)
from support.own_processes import descendants_of, gone, start_reaped, wait_until_gone

# Not imported here: Ray would read its environment before the tests that start it in this process
# have set it.
no_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.process,
    pytest.mark.timeout(3600),
    no_ray,
]
RAY = ["cluster.kind=ray", f"cluster.start_timeout={LONG}", f"cluster.restart_timeout={LONG}"]


class Run:
    """`onepolicy train` under Ray, and the processes that it reports."""

    def __init__(self, out, *arguments, **how):
        self.out, self._said = out, out.with_suffix(".stdout")
        with self._said.open("w") as file:
            self.process = start(*arguments, f"out={out}", *RAY, stdout=file, **how)

    def after(self, step):
        wait_for(lambda: len(steps_of(self.out)) >= step, self.process)
        return dict(
            re.findall(
                r"^(\w+(?: \d+)?)(?:, rank 0)? +(\d+) +\d+\.\d",
                self._said.read_text(),
                re.MULTILINE,
            )
        )

    def next_step(self, since):
        """Return the seconds until another step is in the log."""
        before = len(steps_of(self.out))
        wait_for(lambda: len(steps_of(self.out)) > before, self.process)
        return time.monotonic() - since


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """Run the recipe locally on two ranks. A run with one replica equals it to the bit."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), f"out={out}", "train.ranks=2"]) == 0
    return out


@pytest.fixture
def running_ray(tmp_path):
    """Yield the environment and setting of a run on a Ray that exists before the run and stays."""
    (token := tmp_path / "token").write_text("0" * 64)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0"}
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    head += [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    head += ["--include-dashboard=false"]
    process = start_reaped(head, env=environment, stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, poll=0.5)
        yield {"env": environment}, f"cluster.address=127.0.0.1:{port}"
    finally:
        children = descendants_of(process.pid)
        process.terminate()
        process.wait(LONG)
        wait_until_gone(children)


@pytest.mark.parametrize("victim", ["driver", "rank 1"])
def test_driver_or_rank_killed_under_restarts(victim, recipe, whole, tmp_path):
    """The run leaves neither its Ray nor the processes that Ray started."""
    run = Run(tmp_path / "run", recipe, "train.ranks=2", "--restarts", "1")
    pids = run.after(3)
    everything = descendants_of(int(pids["driver"]))
    actors = int(pids["rank 1"]), int(pids["replica 0"])
    assert set(actors) <= set(everything)
    os.kill(int(pids[victim]), signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: all(map(gone, actors)), run.process)
    print(f"{victim}: rank and replica ended after {time.monotonic() - began:.0f} s")
    print(f"{victim}: next step after {run.next_step(began):.0f} s")
    errors = finished(run.process)
    # Ray's own helpers look only now and then whether it is still there
    wait_for(lambda: all(map(gone, everything)))
    print(f"{victim}: nothing of it is left after {time.monotonic() - began:.0f} s")
    how = "SIGKILL" if victim == "driver" else "exit status 1"
    assert re.search(rf"ended by {how} in step \d; restart 1 of 1", errors)
    assert victim == "driver" or re.search(
        r"onepolicy: .* no answer from rank 1 \(process \d+ on .*\).* rank 1 has ended", errors
    )
    assert_complete(run.out, 6)
    assert_same_run(whole, run.out, 6)


def test_driver_killed_on_a_ray_that_stays(recipe, whole, running_ray, tmp_path):
    """The driver's end takes the run's processes away and frees their resources for the next
    run."""
    how, address = running_ray
    run = Run(tmp_path / "run", recipe, "train.ranks=2", "--restarts", "1", address, **how)
    pids = run.after(3)
    os.kill(int(pids["driver"]), signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: all(gone(int(pids[name])) for name in ("rank 1", "replica 0")), run.process)
    print(f"rank and replica ended after {time.monotonic() - began:.0f} s")
    print(f"next step after {run.next_step(began):.0f} s")
    finished(run.process)
    assert_complete(run.out, 6)
    assert_same_run(whole, run.out, 6)


def test_a_stopped_replica_is_replaced(recipe, tmp_path):
    """The replica is stopped, not killed, so no connection breaks. cluster.reply_timeout is the
    bound."""
    exact = ["numerics=on-policy", "model.dtype=float32"]
    whole = tmp_path / "whole"
    assert main(["train", str(recipe), f"out={whole}", *exact]) == 0
    run = Run(tmp_path / "run", recipe, *exact, "cluster.replicas=2", "cluster.reply_timeout=10")
    stopped = int(run.after(2)["replica 0"])
    os.kill(stopped, signal.SIGSTOP)
    errors = finished(run.process)
    print(re.search(r"replica 0 is back after .*", errors)[0])
    assert "replica 0 is gone (no answer); waiting for Ray to restart it" in errors
    assert gone(stopped)
    assert_complete(run.out, 6)
    assert list(map(without_faults, rows(run.out))) == list(map(timeless, rows(whole)))


def without_faults(row):
    own = ("rollout/replica_restarts", "rollout/requests_repeated")
    return {name: value for name, value in timeless(row).items() if name not in own}
