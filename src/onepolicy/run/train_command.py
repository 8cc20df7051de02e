"""`onepolicy train` once torch is loaded: a run to its end, and its progress in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from onepolicy.config import RunConfig
from onepolicy.console import SHOWN, Console, make_bars
from onepolicy.interfaces import Progress
from onepolicy.launch.launcher import LOCAL_LAUNCHER, Launcher, apply_torchrun_ranks
from onepolicy.launch.ray.connect import open_ray_launcher
from onepolicy.notation import number
from onepolicy.report.terminal import summary_parts
from onepolicy.run import resume, train
from onepolicy.run.run_folder import FROM_SCRATCH

SHOWN_METRICS = (
    ("reward", "train/reward", ".2f"),
    ("k3", "mismatch/k3", ""),
    ("F(2)", "mismatch/f2", ""),
    ("entropy", "train/entropy", ".3f"),
    ("tok/s", "train/tokens_per_second", ".0f"),
)


class TerminalProgress(Progress):
    """Progress bars in a terminal. Elsewhere, such as in a log file, one line per step."""

    def __init__(self, console: Console, bars: Bars, steps: int, first: int = 0) -> None:
        self.console, self.bars = console, bars
        self.steps = bars.add_task("steps", total=steps, completed=first, shown="")
        self.inner = bars.add_task("", total=None, visible=False, shown="")

    def phase(self, name: str, total: int) -> Callable[[], None]:
        self.bars.reset(self.inner, total=total, description=name, visible=True)
        return partial(self.bars.advance, self.inner)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        texts = []
        for label, name, form in SHOWN_METRICS:
            if name in metrics and form:
                texts.append(f"{label} {metrics[name]:{form}}")
            elif name in metrics:
                texts.append(f"{label} {number(metrics[name])}")
        shown = "  ".join(texts)
        scores = "  ".join(
            f"{name} {value:.2f}"
            for name, value in metrics.items()
            if name.startswith("eval/") and "length" not in name
        )
        self.bars.update(self.steps, completed=step, shown=shown)
        self.bars.update(self.inner, visible=False)
        if scores or not self.console.is_terminal:
            self.console.print_line(f"step {step:>4}  {shown}  {scores}".rstrip())

    def note(self, text: str) -> None:
        for line in text.splitlines():
            self.console.print_line(line)


@contextmanager
def terminal_progress(steps: int, first: int = 0) -> Iterator[TerminalProgress]:
    console = Console()
    columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), SHOWN)
    with make_bars(console, *columns) as bars:
        yield TerminalProgress(console, bars, steps, first)


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
    if resumed is not None:
        config = apply_torchrun_ranks(config, ranks, resumed=resumed)  # Ray places as many
    with (
        terminal_progress(steps or config.steps, origin.step) as progress,
        _launcher(config, progress) as launcher,
    ):
        if resumed is not None:
            summary = resume.resume_run(resumed, progress, steps, ranks, launcher, config)
        else:
            if fork is not None:
                resume.note_fork(config, origin, progress)
            summary = train.start_run(config, progress, origin, launcher)
    console = Console()
    for part in summary_parts(summary):
        console.print(part)


@contextmanager
def _launcher(config: RunConfig, progress: Progress) -> Iterator[Launcher]:
    """Yield the launcher that starts the processes of a run."""
    if config.cluster.kind == "local":
        yield LOCAL_LAUNCHER
        return
    with open_ray_launcher(config, progress) as launcher:
        yield launcher
