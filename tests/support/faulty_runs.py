"""Shared parts of the tests of faults: runs in processes of their own, moments of the faults, and
conditions that must hold afterwards."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryFile

import pytest
import torch
from safetensors.torch import load_file

from onepolicy.train import checkpoint
from support.own_processes import children_of, gone, start_process  # noqa: F401 (gone: others)
from support.waiting import POLL_S, wait_until

SPACE, LINK, FAR_LINK = (
    f"{name}{os.getpid()}" for name in ("onepolicy-", "opnear", "opfar")
)  # of this session
NEAR, FAR = (f"10.213.{os.getpid() % 256}.{end}" for end in (1, 2))
LONG = 600  # s; what is waited for comes much earlier on a quiet machine


def start(*arguments, program=("-m", "onepolicy"), **how):
    """Start `onepolicy train ...` in a process group of its own. `program` is the code that Python
    runs."""
    errors = TemporaryFile()  # noqa: SIM115 (closed with the process)
    how = {"stdout": DEVNULL, "stderr": errors} | how
    process = start_process([sys.executable, *program, "train", *arguments], **how)
    process.errors = errors
    return process


def said(process):
    """Return what a run has written to stderr so far."""
    return os.pread(process.errors.fileno(), 2**24, 0).decode()


def finished(process, status=0):
    """Wait for the run's end and return its stderr. It must end in time, with this exit status."""
    try:
        process.wait(LONG)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    errors = said(process)
    assert process.returncode == status, errors
    assert "Traceback" not in errors, errors
    return errors


def wait_for(condition, process=None, poll=POLL_S):
    """Wait for the condition. `process`, a run, must live until then."""

    def met():
        if not (found := condition()) and process is not None:
            assert process.poll() is None, said(process)
        return found

    return wait_until(met, LONG, poll=poll)


class Fault:
    """A fault that has just struck the run in folder `out`. `pytest -rP` shows the time to
    recovery: until the log has a new step."""

    def __init__(self, out):
        self.out, self.had, self.began = out, len(steps_of(out)), time.monotonic()

    def ended(self):
        """Print the time until the run ended by itself. The caller has waited for LONG at most."""
        print(f"ended after {time.monotonic() - self.began:.1f} s")
        self.had = len(steps_of(self.out))

    def recovered(self, run):
        """Wait until `run`, the one that was hit or its successor, has a new step."""
        wait_for(lambda: steps_of(self.out)[-1:] > [self.had], run)
        print(f"recovered after {time.monotonic() - self.began:.1f} s")

    def survived(self, run):
        """Wait until `run` ends and return its stderr."""
        self.recovered(run)
        return finished(run)

    def resumed(self, *settings):
        """Run `--resume` with these settings to the end."""
        self.survived(start("--resume", self.out, *settings))


def steps_of(out):
    """Return the steps in the log so far. An incomplete last line does not count."""
    path = out / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(row):
    """Return a metrics row without the fields that depend on the clock."""
    return {
        k: v
        for k, v in row.items()
        if not k.startswith("time/") and "per_second" not in k and k != "program/seconds"
    }


def rank_of(agent, rank):
    """Return the process of a rank that this agent has started."""
    own = f"RANK={rank}".encode()
    for child in children_of(agent):
        if own in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return child
    raise AssertionError(f"no rank {rank}")


def assert_complete(out, steps):
    """Check that every step is there once, in order, each a whole batch, without leftovers of an
    interrupted save."""
    assert [row["step"] for row in rows(out)] == list(range(1, steps + 1))
    problems = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["problem"]) for line in problems] == sorted(
        {(line["step"], line["problem"]) for line in problems}
    )
    assert (out / "summary.json").exists()
    assert [
        p for p in (out / "checkpoints").iterdir() if not re.fullmatch(r"step_\d+", p.name)
    ] == []
    checkpoint.verify(checkpoint.latest_checkpoint(out))


def assert_same_run(expected, out, step):
    """Check for equality to the bit: metrics but for times, samples, and every tensor of the last
    checkpoint."""
    assert list(map(timeless, rows(expected))) == list(map(timeless, rows(out)))
    assert (expected / "samples.jsonl").read_text() == (out / "samples.jsonl").read_text()
    folders = [checkpoint.checkpoint_folder(run, step) for run in (expected, out)]
    files = [sorted(str(p.relative_to(f)) for p in f.rglob("*.safetensors")) for f in folders]
    assert files[0] == files[1] != []
    for name in files[0]:
        first, second = (load_file(folder / name) for folder in folders)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first), name


@contextmanager
def small_disk(folder, mib):
    """Yield the folder of a tmpfs of its own, and a function that gives it another size in MiB.

    It is mounted in a namespace that only a shell is in, so that it needs no root. Other processes
    reach it through /proc.
    """
    folder.mkdir()
    shell, said = _mounted("-Urm", folder, mib)
    if said != "done":
        shell, said = _mounted("-m", folder, mib)
    if said != "done":
        pytest.skip(
            f"a tmpfs can be mounted neither in a user namespace (unshare -Urm) nor as root: {said}"
        )

    def grow(more):
        assert _mount(shell, f"remount,size={more}m", folder) == "done"

    try:
        yield Path(f"/proc/{shell.pid}/root{folder}"), grow
    finally:
        shell.kill()
        shell.communicate()


def _mounted(namespaces, folder, mib):
    shell = Popen(["unshare", namespaces, "sh"], stdin=PIPE, stdout=PIPE, stderr=STDOUT, text=True)
    said = _mount(shell, f"size={mib}m", folder)
    if said != "done":
        shell.kill()
        shell.communicate()
    return shell, said


def _mount(shell, options, folder):
    """Mount the tmpfs. With a source named, mount does not repeat the mounted one's options, whose
    uid may have no name in there."""
    with suppress(BrokenPipeError):
        shell.stdin.write(
            f"mount -t tmpfs -o {options} tmpfs {shlex.quote(str(folder))} && echo done\n"
        )
        shell.stdin.flush()
    return shell.stdout.readline().strip()


def ip(*words, check=True):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
