"""A vLLM server that is killed, hangs or cannot be reached in the middle of a run. The server is real, in a network
namespace of its own; its link is what is taken down."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from faults_support import (
    FAR,
    LINK,
    LONG,
    SPACE,
    assert_complete,
    ended_after,
    finished,
    ip,
    rows,
    start,
    steps_of,
    wait_for,
)

from onepolicy.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(3600)]
TOKEN = "FAULTS_TOKEN"
SETTINGS = ["dtype=float32", "slots=8", "cache_gib=0.125", "block_size=32"]


class Far:
    """`onepolicy engine serve` at the other end, or on this machine where there is none."""

    def __init__(self, policy, log, network):
        self.policy, self.log, self.lives = policy, log, 0
        self.host, self.enter = (FAR, ["ip", "netns", "exec", SPACE]) if network else ("127.0.0.1", [])
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://{self.host}:{self.port}"

    def start(self):
        self.lives += 1
        path = self.log.with_suffix(f".{self.lives}")
        serve = [sys.executable, "-m", "onepolicy.cli", "engine", "serve", str(self.policy), "--host", self.host]
        serve += ["--port", str(self.port), "--token-env", TOKEN, *SETTINGS]
        with path.open("ab") as file:
            self.process = subprocess.Popen([*self.enter, *serve], stdout=file, stderr=file, start_new_session=True)
        wait_for(lambda: "ready after" in path.read_text() or self.process.poll() is not None, poll=0.2)
        assert self.process.poll() is None, path.read_text()

    def send(self, number):
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()


@pytest.fixture(scope="module")
def server(network, policy, tmp_path_factory):
    os.environ[TOKEN] = "s3cret"
    server = Far(policy, tmp_path_factory.mktemp("server") / "log", network)
    try:
        server.start()
        yield server
    finally:
        server.send(signal.SIGKILL)
        del os.environ[TOKEN]


@pytest.fixture
def begin(server, recipe, tmp_path):
    """begin("a.b=c", ...) -> a run on that server that has taken two steps, and its folder."""

    def run(*overrides):
        out = tmp_path / "run"
        engine = ["kind=vllm-server", f"url={server.url}", f"token_env={TOKEN}", "dtype=float32", "slots=8"]
        engine += ["timeout_s=4", "retries=1", *overrides]
        process = start(recipe, f"out={out}", "steps=12", *(f"rollout.engine.{setting}" for setting in engine))
        wait_for(lambda: len(steps_of(out)) >= 2, process)
        return process, out

    return run


def assert_right(out, steps=12):
    """Whole, and every token sampled from the learner's weights: float32 on both sides leaves rounding only. Other
    weights, of a step before or of the start, are 1e-5 and more away."""
    assert_complete(out, steps)
    assert all(row["mismatch/k3"] < 1e-6 for row in rows(out))
    assert all(row["replay/missing_samples"] == row["replay/native_rows"] == 0 for row in rows(out))


@pytest.fixture
def link(network):
    if not network:
        pytest.skip("no network namespace can be made here")


def test_a_link_that_fails_for_a_while_is_survived(begin, link):
    run, out = begin("patience_s=300")
    ip("link", "set", LINK, "down")
    time.sleep(12)  # longer than the retries last
    assert run.poll() is None
    ip("link", "set", LINK, "up")
    errors = finished(run)
    print(re.search(r"the engine is back after \d+ s", errors)[0])
    assert_right(out)


def test_a_link_that_stays_down_ends_the_run_in_time(begin, link):
    run, out = begin("patience_s=5")
    ip("link", "set", LINK, "down")
    began = time.monotonic()
    try:
        errors = finished(run, status=1)
    finally:
        ip("link", "set", LINK, "up")
    ended_after(began)
    assert "--resume" in errors
    assert main(["train", "--resume", str(out)]) == 0
    assert_right(out)


def test_a_server_that_hangs_ends_the_run_in_time(begin, server):
    """Stopped: its sockets accept, nobody answers."""
    run, out = begin("patience_s=5")
    server.send(signal.SIGSTOP)
    began = time.monotonic()
    try:
        errors = finished(run, status=1)
    finally:
        server.send(signal.SIGCONT)
    ended_after(began)
    assert "got no answer within 4 s (rollout.engine.timeout_s)" in errors
    assert main(["train", "--resume", str(out)]) == 0
    assert_right(out)


def test_a_server_that_hangs_for_a_while_is_survived(begin, server):
    run, out = begin("patience_s=300")
    server.send(signal.SIGSTOP)
    time.sleep(12)
    server.send(signal.SIGCONT)
    finished(run)
    assert_right(out)


def test_a_server_killed_in_the_middle_of_a_batch_and_restarted(begin, server):
    """On its port, with the weights it starts with: the run gives it its own and samples the batch again."""
    run, out = begin(f"patience_s={LONG}")
    server.send(signal.SIGKILL)
    server.start()
    errors = finished(run)
    print(re.search(r"the engine is back after \d+ s", errors)[0])
    assert_right(out)


def test_a_server_that_stays_dead_ends_the_run_in_time(begin, server):
    run, out = begin("patience_s=3")
    server.send(signal.SIGKILL)
    began = time.monotonic()
    errors = finished(run, status=1)
    ended_after(began)
    assert "--resume" in errors
    server.start()
    assert main(["train", "--resume", str(out)]) == 0
    assert_right(out)
