"""Start, kill, resume and compare runs of the command line."""

import os
import signal
import subprocess
import sys
import time

import torch
from safetensors.torch import load_file

from onepolicy.train import checkpoint
from support.metrics import rows, timeless

EVERY = ["checkpoint.every=1", "optim.lr=1e-5"]  # a hundred steps at 1e-3 and the routers collapse


def assert_same_run(a, b, step):
    assert list(map(timeless, rows(a))) == list(map(timeless, rows(b)))
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (
            load_file(checkpoint.checkpoint_folder(run, step) / name) for run in (a, b)
        )
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first), name


def command(*arguments):
    return [sys.executable, "-m", "onepolicy", *arguments]


def run_and_kill(arguments, when):
    """Start a command and SIGKILL it once `when()` is true. Return whether it was still running."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        if when():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.01)
    return False


def next_command(recipe, out, steps):
    """Start the run if there is none yet, else resume it."""
    if (out / "config.json").exists():
        return command("train", "--resume", str(out))
    return command("train", str(recipe), f"out={out}", f"steps={steps}", *EVERY)


def finish(recipe, out, steps):
    done = subprocess.run(
        next_command(recipe, out, steps), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


STANDS_STILL = """
import os, signal, sys
from onepolicy.cli import main
from onepolicy.train.learner import LocalLearner
step, begun = LocalLearner.step, []
def stand_still(learner, batch):
    begun.append(1)
    if len(begun) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(learner, batch)
LocalLearner.step = stand_still
sys.exit(main(sys.argv[2:]))
"""


def kill_in_the_update_of(step, arguments):
    """SIGKILL a run in the update of the step with this number, counted from its own first step.
    The run stops itself there after sampling."""
    command = [sys.executable, "-c", STANDS_STILL, str(step), *arguments[3:]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it ended before, with status {status}"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
