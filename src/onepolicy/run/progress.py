"""Progress of a run in the terminal: a bar for the steps, and one for the current phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from onepolicy.console import SHOWN, Console, make_bars
from onepolicy.interfaces import Progress as RunProgress
from onepolicy.notation import number

SHOWN_METRICS = (
    ("reward", "train/reward", ".2f"),
    ("k3", "mismatch/k3", ""),
    ("F(2)", "mismatch/f2", ""),
    ("entropy", "train/entropy", ".3f"),
    ("tok/s", "train/tokens_per_second", ".0f"),
)


class TerminalProgress(RunProgress):
    """Progress bars in a terminal. Elsewhere, such as in a log file, one line per step."""

    def __init__(self, console: Console, bars: Progress, steps: int, first: int = 0) -> None:
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
