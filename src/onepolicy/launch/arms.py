"""Runs of one recipe in several arms, each in a process of its own, some of them at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onepolicy.config import TrainingError, UsageError, load
from onepolicy.config.stored_config import CONFIG, read_stored_config

SUMMARY, METRICS, CONSOLE = "summary.json", "metrics.jsonl", "console.txt"
CHECKPOINTS = "checkpoints"
POLL_S = 0.2
SHOWN_LINES = 12  # of an arm's console, when it fails


@dataclass(frozen=True, slots=True)
class Arm:
    """One run: its name, its settings beside the recipe, and its folder."""

    name: str
    seed: int
    settings: tuple[str, ...]
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).exists()

    @property
    def steps_done(self) -> int:
        """Return how many steps are in the run's log."""
        path = self.folder / METRICS
        if not path.exists():
            return 0
        return path.read_bytes().count(b'"train/reward"')

    def command(self, recipe: str) -> list[str]:
        """Return the command that starts this run, or resumes it from its newest checkpoint."""
        train = [sys.executable, "-m", "onepolicy", "train"]
        if any(self.folder.glob(f"{CHECKPOINTS}/step_*")):
            return [*train, "--resume", str(self.folder)]
        return [*train, recipe, *self.settings, f"out={self.folder}"]


def check_arms(recipe: str, arms: Sequence[Arm]) -> None:
    """Raise UsageError if an arm's settings are wrong, or its folder holds another run."""
    for arm in arms:
        try:
            config = load(recipe, [*arm.settings, f"out={arm.folder}"])
        except UsageError as error:
            raise UsageError(f"arm {arm.name}: {error}") from None
        if (arm.folder / CONFIG).exists() and read_stored_config(arm.folder) != config:
            raise UsageError(
                f"{arm.folder}: holds a run with other settings than arm {arm.name} now has; give "
                "another --out, or remove the folder"
            )


def play_arms(
    recipe: str,
    arms: Sequence[Arm],
    jobs: int,
    watch: Callable[[Arm, bool], None] = lambda arm, ended: None,
) -> None:
    """Run every arm that has not finished, at most `jobs` at a time.

    watch: called again and again with each arm that is running, the last time when its process
    has ended. Raises TrainingError with the arm's last lines if one fails; the others are then
    ended too.
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
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def _start(recipe: str, arm: Arm) -> subprocess.Popen[bytes]:
    console = arm.folder.with_name(f"{arm.folder.name}-{CONSOLE}")
    console.parent.mkdir(parents=True, exist_ok=True)
    with console.open("wb") as output:
        return subprocess.Popen(
            arm.command(recipe), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )


def _check_end(arm: Arm, status: int) -> None:
    if status == 0:
        return
    console = arm.folder.with_name(f"{arm.folder.name}-{CONSOLE}")
    last = console.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    raise TrainingError(
        f"arm {arm.name} ended with status {status}; {console} ends with\n" + "\n".join(last)
    )
