"""A whole `main_ppo` in processes of its own: started, waited for with a limit, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT
from support.waiting import wait_until

LIMIT_S = 1500  # s; with a load of 17 on two cores a run took 1067 s
QUIET_EXIT_S = 30  # s in which Ray's processes may end by themselves
STARTS = 4
RAY_TOO_SLOW = "The current node timed out during startup"
MARK = "ONEPOLICY_WHOLE_RUN"
"""Environment variable by which a run's processes are found, whoever their parent is by then."""
RAY = {
    "RAY_ADDRESS": "local",  # never somebody else's Ray
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",  # or it starts a process for each of its CPUs
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_memory_monitor_refresh_ms": "0",  # other people's memory is no reason to end a worker
}


@dataclass(frozen=True)
class WholeRun:
    """A run that has ended.

    Attributes:
        status: its exit status.
        output: everything that its processes printed.
        steps: the metrics of each step in verl's log file.
    """

    status: int
    output: str
    steps: list[dict[str, float]]


def run_main_ppo(folder: Path, settings: list[str], environment: dict[str, str]) -> WholeRun:
    """Run `python -m verl.trainer.main_ppo` with these settings in the folder.

    None of its processes is left when this returns or raises.

    Ray gives its first node 30 s to start. Where that is not enough, it is tried again.

    Raises AssertionError with the last lines of the output if a run takes longer than LIMIT_S.
    """
    for _ in range(STARTS):
        run = _run_once(folder, settings, environment)
        if RAY_TOO_SLOW not in run.output:
            break
    return run


def _run_once(folder: Path, settings: list[str], environment: dict[str, str]) -> WholeRun:
    output, steps = folder / "output.txt", folder / "steps.jsonl"
    own = RAY | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}",
        "VERL_FILE_LOGGER_PATH": str(steps),
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
    }
    with _temporary_folder() as ray, _ended_processes() as mark:
        own |= {MARK: mark, "RAY_TMPDIR": ray}
        with output.open("wb") as file:  # a pipe would wait for every process that has inherited it
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *settings],
                env=os.environ | own | environment,
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            lines = output.read_text(errors="replace")[-4000:]
            raise AssertionError(f"main_ppo has not ended after {LIMIT_S} s:\n{lines}") from None
        with suppress(AssertionError):  # the others are killed
            wait_until(lambda: not processes_with(f"{MARK}={mark}"), QUIET_EXIT_S, poll=0.2)
    logged = []
    if steps.exists():
        logged = [json.loads(line)["data"] for line in steps.read_text().splitlines()]
    return WholeRun(process.returncode, output.read_text(errors="replace"), logged)


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """Yield a folder for Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def _ended_processes() -> Iterator[str]:
    """Yield a mark for the environment of processes, and end all that carry it."""
    mark = uuid.uuid4().hex
    try:
        yield mark
    finally:
        wait_until(lambda: not _kill(processes_with(f"{MARK}={mark}")), poll=0.2)


def processes_with(variable: str) -> list[int]:
    """Return the ids of all living processes that were started with NAME=VALUE."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _kill(processes: list[int]) -> list[int]:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return processes
