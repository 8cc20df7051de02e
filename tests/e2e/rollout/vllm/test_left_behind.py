"""Pytest that is ended in the middle of a test leaves no process of a served engine behind."""

import os
import signal
import sys

import pytest

from support.own_processes import descendants_of, start_process, wait_until_gone
from support.paths import ROOT
from support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(1800)]
TEST = """
import signal
from pathlib import Path
from support.vllm_engines import ServerProcess

def test_of_a_server(tmp_path):
    server = ServerProcess(Path("{folder}"), tmp_path / "log")
    try:
        server.wait_until_ready()
        Path("{ready}").touch()
        signal.pause()
    finally:
        server.stop()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_every_end_of_pytest_ends_its_server(folders, tmp_path, number):
    ready, test = tmp_path / "ready", tmp_path / "test_inner.py"
    test.write_text(TEST.format(folder=folders[0], ready=ready))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["--rootdir", tmp_path, test]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    with (tmp_path / "said").open("w") as said:
        process = start_process(command, env=environment, stdout=said, stderr=said)
    wait_until(lambda: ready.exists() or process.poll() is not None, 900, poll=0.1)
    assert process.poll() is None, (tmp_path / "said").read_text()
    server = descendants_of(process.pid)
    assert len(server) >= 5  # command, reaper, server, engine, worker
    process.send_signal(number)
    process.wait(900)
    wait_until_gone(server)
