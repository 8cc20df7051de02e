"""Run `onepolicy ...` in a process forked from this one, which has loaded torch and transformers.

So a hundred commands load them once. A process forked from a sound one is a new process: its
settings, output and exit status are its own.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

MODULES = ("torch", "transformers.models.qwen3_moe.modeling_qwen3_moe", "onepolicy.cli")
MODULES += ("onepolicy.run.train", "onepolicy.measure.measure", "onepolicy.audit.run")
MODULES += ("onepolicy.report.page", "plotly.graph_objects", "pyarrow.parquet")


def load() -> None:
    """Load what the commands need."""
    for name in MODULES:
        importlib.import_module(name)


def run_forked(
    words: list[str], folder: Path, environment: dict[str, str], output: Path, limit: float
) -> int:
    """Run `onepolicy` with the words behind its name. Return its exit status, 124 if it is late."""
    child = os.fork()
    if child == 0:
        _become(words, folder, environment, output)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _become(words: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    """Be the command, in the child. Does not return."""
    status = 70
    try:
        os.chdir(folder)
        os.environ.update(environment)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(f"{output}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["onepolicy", *words]
        from onepolicy.__main__ import run

        status = run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
