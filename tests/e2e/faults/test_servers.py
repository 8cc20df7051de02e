"""A vLLM server that is killed, hangs or cannot be reached in the middle of a run. The server is
real, and in a network namespace of its own if one can be made."""

import os
import re
import signal
import socket
import sys
import time
from functools import partial
from itertools import groupby

import pytest

from support.faulty_runs import (
    FAR,
    LINK,
    LONG,
    NEAR,
    SPACE,
    Fault,
    assert_complete,
    finished,
    ip,
    rows,
    said,
    start,
    steps_of,
    wait_for,
)
from support.own_processes import descendants_of, start_process, wait_until_gone
from support.relay import Relay

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.process, pytest.mark.timeout(3600)]
TOKEN = "FAULTS_TOKEN"
SETTINGS = ["dtype=float32", "max_num_seqs=8", "kv_cache_gib=0.125", "block_size=32"]


class Far:
    """`onepolicy engine serve` at the other end of the network, or on this machine without one."""

    def __init__(self, policy, log, network):
        self.policy, self.log, self.lives = policy, log, 0
        self.near, self.host = (NEAR, FAR) if network else ("127.0.0.1", "127.0.0.1")
        self.enter = ["ip", "netns", "exec", SPACE] if network else []
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"

    def start(self):
        self.lives += 1
        path = self.log.with_suffix(f".{self.lives}")
        serve = [sys.executable, "-m", "onepolicy", "engine", "serve", self.policy]
        serve += ["--host", self.host, "--port", self.port, "--token-env", TOKEN, *SETTINGS]
        serve += ["--name", self.near]  # a relay is called so
        with path.open("ab") as file:
            self.process = start_process([*self.enter, *serve], stdout=file, stderr=file)
        wait_for(
            lambda: "ready after" in path.read_text() or self.process.poll() is not None, poll=0.2
        )
        assert self.process.poll() is None, path.read_text()

    def send(self, number):
        """Send a signal to the server, but not to what ends it when this process ends."""
        _, *server = descendants_of(self.process.pid)
        for pid in server:
            os.kill(pid, number)

    def kill(self):
        everything = descendants_of(self.process.pid)
        self.process.kill()
        self.process.wait()
        wait_until_gone(everything)


@pytest.fixture(scope="module")
def server(network, policy, tmp_path_factory):
    os.environ[TOKEN] = "s3cret"
    server = Far(policy, tmp_path_factory.mktemp("server") / "log", network)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        del os.environ[TOKEN]


@pytest.fixture
def begin(server, recipe, tmp_path):
    """Return begin(url, "a=b", ..., more=["a.b=c", ...]), which starts a run on the server and
    returns its process and folder after two steps. a: a setting of the engine."""

    def run(url, *overrides, more=()):
        out = tmp_path / "run"
        engine = ["kind=vllm-server", f"url={url}", f"token_env={TOKEN}", "dtype=float32"]
        engine += ["max_num_seqs=8", "timeout_s=60", "retries=1", *overrides]
        engine = [f"rollout.engine.{setting}" for setting in engine]
        process = start(recipe, f"out={out}", "steps=12", *more, *engine)
        wait_for(lambda: len(steps_of(out)) >= 2, process)
        return process, out

    return run


def approved(url):
    """Return the settings by which who resumes a run agrees to its server and its token."""
    return f"rollout.engine.url={url}", f"rollout.engine.token_env={TOKEN}"


def assert_right(out, ahead=0):
    """Check that the run is whole and that every token was sampled from the learner's weights.
    float32 on both sides leaves only rounding; weights of an earlier step differ by 1e-5 and more.
    A sample that spans an update does too: vLLM keeps the keys and values of the older weights.
    """
    assert_complete(out, 12)
    name = "mismatch/k3_staleness@0" if ahead else "mismatch/k3"
    found = [row[name] for row in rows(out) if name in row and not row.get("staleness/spanning")]
    assert found
    assert max(found) < 1e-6
    assert all(row["replay/missing_samples"] == row["replay/native_rows"] == 0 for row in rows(out))


@pytest.fixture(params=["link", "relay", "server"])
def silent(request, network, server):
    """Yield (url, start, end) of a silence in which nothing is refused and nothing arrives: the
    link is down, a relay forwards nothing, or the server is stopped."""
    if request.param == "link":
        if not network:
            pytest.skip("a network namespace and a veth need root, CAP_NET_ADMIN and iproute2")
        down, up = (partial(ip, "link", "set", LINK, state) for state in ("down", "up"))
        yield server.url, down, up
    elif request.param == "relay":
        with Relay(server.near, (server.host, server.port)) as relay:
            yield "http://{}:{}".format(*relay.address), relay.stall, relay.go_on
    else:
        yield server.url, partial(server.send, signal.SIGSTOP), partial(server.send, signal.SIGCONT)


def test_silence_for_a_while_is_survived(begin, silent):
    url, begins, ends = silent
    run, out = begin(url, "timeout_s=4", f"recovery_timeout_s={LONG}")
    begins()
    try:
        wait_for(lambda: "Waiting up to" in said(run), run)
    finally:
        ends()
    errors = Fault(out).survived(run)
    print(re.search(r"the engine is back after \d+ s", errors)[0])
    assert_right(out)


def test_silence_in_the_middle_of_an_update_is_survived(begin, server):
    """The server receives the update after the run has given it up, and then the next update."""
    with Relay(server.near, (server.host, server.port)) as relay:
        url = "http://{}:{}".format(*relay.address)
        run, out = begin(url, "timeout_s=4", f"recovery_timeout_s={LONG}")
        relay.stall_before(b"onepolicy_receive")
        wait_for(lambda: relay.stalled.is_set() and "Waiting up to" in said(run), run)
        relay.go_on()
        Fault(out).survived(run)
        assert_right(out)


def test_silence_that_lasts_ends_the_run_in_time(begin, silent):
    url, begins, ends = silent
    run, out = begin(url, "timeout_s=4", "recovery_timeout_s=5")
    begins()
    fault = Fault(out)
    try:
        errors = finished(run, status=1)
    finally:
        ends()
    fault.ended()
    # without its link there is no way to open another connection either
    assert re.search(r"rollout.engine.timeout_s|got Connect\w+: ", errors), errors
    assert "--resume" in errors
    Fault(out).resumed(*approved(url))
    assert_right(out)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_server_is_killed_and_restarted(begin, server, ahead):
    """The server comes back on its port with its initial weights. The run sends it the current
    weights and samples the batch again, or the episodes of every step in play. No request reaches
    the server before it has its weights."""
    # what two updates of this learning rate change is more than `min_agreement` allows by default
    more = [f"rollout.max_staleness={ahead}", "replay.min_agreement=0.5"] if ahead else []
    run, out = begin(server.url, f"recovery_timeout_s={LONG}", more=more)
    server.kill()
    fault = Fault(out)
    server.start()
    print(f"the server is back after {time.monotonic() - fault.began:.1f} s")
    fault.survived(run)
    assert_right(out, ahead)
    assert all(row.get("staleness/max", 0) <= ahead for row in rows(out))


def test_a_server_that_stays_dead_ends_the_run_in_time(begin, server):
    run, out = begin(server.url, "recovery_timeout_s=3")
    server.kill()
    fault = Fault(out)
    errors = finished(run, status=1)
    fault.ended()
    assert "--resume" in errors
    server.start()
    Fault(out).resumed(*approved(server.url))
    assert_right(out)


def test_one_of_two_servers_is_killed_and_comes_back(begin, server, network, policy, tmp_path):
    """The first one samples alone meanwhile, and every token is of the learner's weights."""

    def servers(out):
        return [row["rollout/servers"] for row in rows(out)]

    other = Far(policy, tmp_path / "other", network)
    other.start()
    try:
        run, out = begin(f'["{server.url}", "{other.url}"]', more=["steps=100000", "optim.lr=3e-5"])
        other.kill()
        wait_for(lambda: servers(out)[-1] == 1, run)
        other.start()
        fault = Fault(out)
        wait_for(lambda: servers(out)[-3:] == [2, 2, 2], run)
        fault.ended()
        run.send_signal(signal.SIGINT)
        finished(run, status=130)
    finally:
        other.kill()
    found = rows(out)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert all(row["mismatch/k3"] < 1e-9 for row in found)  # one update at this rate: above 1e-8
    assert all(row["replay/missing_samples"] == 0 for row in found)
    assert [number for number, _ in groupby(servers(out))] == [2, 1, 2]
