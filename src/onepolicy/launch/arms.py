"""Runs of one recipe in several arms, each in a process of its own, some of them at a time."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onepolicy.bounded import refuse_holes
from onepolicy.config import ServiceUnavailable, TrainingError, UsageError
from onepolicy.config.output_paths import CONFIG
from onepolicy.files import open_for_appending, open_lock
from onepolicy.launch.restarts import describe_status

SUMMARY, METRICS, CONSOLE = "summary.json", "metrics.jsonl", "console.txt"
POLL_S = 0.2
EXIT_TIMEOUT_S = 25.0
"""Seconds that a run has to end after SIGTERM before it is killed. Its report takes up to 20."""
SHOWN_LINES = 12  # of an arm's console, when it fails


@dataclass(frozen=True, slots=True)
class Arm:
    """One run: its name, its settings beside the recipe, its steps, and its folder."""

    name: str
    seed: int
    settings: tuple[str, ...]
    steps: int
    folder: Path
    repeated: tuple[str, ...] = ()
    """Settings that a resume has to name again (config/stored_config.py)."""

    @property
    def label(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def console(self) -> Path:
        """Return the file with everything that its processes print."""
        return self.folder.with_name(f"{self.folder.name}-{CONSOLE}")

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).exists()

    @property
    def steps_done(self) -> int:
        """Return how many steps are in the run's log."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        refuse_holes(path, "restore the file")
        return path.read_bytes().count(b'"train/reward"')

    @property
    def overrides(self) -> list[str]:
        """Return the settings and the folder, as `onepolicy train` reads them."""
        return [*self.settings, f"out={json.dumps(str(self.folder), ensure_ascii=False)}"]

    def command(self, recipe: Path) -> list[str]:
        """Return the command that starts this run, or resumes it.

        A run that has no checkpoint yet is resumed at its start. The process ends when its stdin
        is closed (cli/arm_process.py), so it does not outlive this one.
        """
        train = [sys.executable, "-P", "-m", "onepolicy.cli.arm_process", "train"]
        if (self.folder / CONFIG).exists():
            return [*train, f"--resume={self.folder}", *self.repeated]
        return [*train, str(recipe), *self.overrides]


@contextmanager
def lock_arms(folder: Path) -> Iterator[None]:
    """Make the folder of the runs and lock it. Raises UsageError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_lock(folder / ".lock")
    except OSError as error:
        raise UsageError(
            f"{folder / '.lock'}: {error.strerror}; is it a symbolic link? Give another --out"
        ) from None
    try:
        with suppress(OSError):  # no locks on this system
            _take(lock, folder)
        yield
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    """Lock the folder. Raises UsageError if another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{folder}: another `onepolicy compare` is at work in this folder; wait for it or stop "
            "it, or give another --out"
        ) from None


def play_arms(
    recipe: Path,
    arms: Sequence[Arm],
    jobs: int,
    watch: Callable[[Arm, bool], None] = lambda arm, ended: None,
) -> None:
    """Run every arm that has not finished, at most `jobs` at a time.

    watch: called again and again with each arm that is running, the last time when its process
    has ended. Raises UsageError, ServiceUnavailable or TrainingError with the arm's last lines if
    one fails, as its own command would; the others are then ended too.
    """
    waiting = [arm for arm in arms if not arm.finished]
    running: dict[Arm, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                arm = waiting.pop(0)
                running[arm] = _start(recipe, arm)
            time.sleep(POLL_S)
            for arm, process in list(running.items()):
                ended = process.poll() is not None
                watch(arm, ended)
                if ended:
                    del running[arm]
                    _check_end(arm, process.returncode)
    finally:
        _end(list(running.values()))


def _start(recipe: Path, arm: Arm) -> subprocess.Popen[bytes]:
    with os.fdopen(open_for_appending(arm.console), "ab") as output:
        return subprocess.Popen(
            arm.command(recipe), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_end(arm: Arm, status: int) -> None:
    if status == 0:
        return
    kind: type[UsageError | TrainingError] = TrainingError
    if status == ServiceUnavailable.EXIT:
        kind = ServiceUnavailable
    elif status == 2:
        kind = UsageError
    last = arm.console.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
    raise kind(
        f"arm {arm.label}: ended by {describe_status(status)}; the same command goes on after the "
        f"last checkpoints. {arm.console} ends with\n" + "\n".join(last)
    )
