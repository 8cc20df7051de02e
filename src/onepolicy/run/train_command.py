"""`onepolicy train` once torch is loaded: a run from its start or a checkpoint to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onepolicy.config import RunConfig
from onepolicy.console import Console
from onepolicy.interfaces import Progress
from onepolicy.launch.launcher import LOCAL_LAUNCHER, Launcher
from onepolicy.launch.ray.connect import open_ray_launcher
from onepolicy.report.terminal import summary_table
from onepolicy.run import resume, train
from onepolicy.run.progress import terminal_progress
from onepolicy.run.run_folder import FROM_SCRATCH


def run_to_end(
    config: RunConfig,
    *,
    fork: Path | None = None,
    resumed: Path | None = None,
    steps: int | None = None,
    ranks: int | None = None,
) -> None:
    """Train a new run, or go on with one, and print its summary.

    fork: the checkpoint of another run to start from. resumed: the run to go on with after its
    newest checkpoint; steps, ranks: then in place of those in `config`.
    """
    origin = FROM_SCRATCH
    if fork is not None:
        origin = resume.fork_origin(fork)
    with (
        terminal_progress(steps or config.steps, origin.step) as progress,
        _launcher(config, progress) as launcher,
    ):
        if resumed is not None:
            summary = resume.resume_run(resumed, progress, steps, ranks, launcher, config)
        else:
            summary = train.start_run(config, progress, origin, launcher)
    Console().print(summary_table(summary))


@contextmanager
def _launcher(config: RunConfig, progress: Progress) -> Iterator[Launcher]:
    """Yield the launcher that starts the processes of a run."""
    if config.cluster.kind == "local":
        yield LOCAL_LAUNCHER
        return
    with open_ray_launcher(config, progress) as launcher:
        yield launcher
