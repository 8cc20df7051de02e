"""The processes that play a study's runs: none is waited for in vain, none is left behind."""

import subprocess
import sys

import pytest

from support.own_processes import start_process, wait_until_gone
from support.paths import ROOT
from support.waiting import wait_until

pytestmark = pytest.mark.process
STUDY = """
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from evidence import trials

HERE = Path(__file__).parent

def play(job):
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "full":
        raise OSError(28, "No space left on device")
    if job == "waits":
        (HERE / "making").write_text(str(os.getpid()))
        (HERE / "making").rename(HERE / "pid")
        time.sleep(600)
    return {"job": job}

if __name__ == "__main__":
    for line in trials.played(play, sys.argv[2:], workers=1):
        print(line["job"], flush=True)
"""


@pytest.fixture
def study(tmp_path):
    """Return the command of a study whose runs are named by words."""
    path = tmp_path / "study.py"
    path.write_text(STUDY)
    return [sys.executable, path, ROOT / "benchmarks"]


@pytest.mark.parametrize(
    ("last", "said"), [("killed", "BrokenProcessPool"), ("full", "No space left on device")]
)
def test_a_run_without_a_line_ends_the_study(study, last, said):
    ended = subprocess.run([*study, "a", "b", last, "c"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "a\nb\n")
    assert said in ended.stderr


def test_a_killed_study_leaves_no_worker(study, tmp_path):
    process = start_process([*study, "waits"])
    wait_until((tmp_path / "pid").exists, process=process)
    process.kill()
    process.wait()
    wait_until_gone([int((tmp_path / "pid").read_text())])
