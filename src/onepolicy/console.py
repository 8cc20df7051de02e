"""The only way to a terminal: text that somebody else wrote is shown, never obeyed.

Names of files, a stranger's run, replies and sampled text may hold escape sequences, which clear a
screen or write the clipboard, and rich's markup. Here every character that is not printable is
escaped, and nothing is markup. Style comes in as arguments and as rich's Text. Libraries print
their own logs and warnings, so `escape_logs` escapes these in the process.
"""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from onepolicy.config import printable
from onepolicy.errors import printable_lines

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SHOWN = TextColumn("{task.fields[shown]}", markup=False)
"""The column of a bar with the field `shown` of its task."""


def print_text(text: object, *, stderr: bool = False) -> None:
    """Print lines of text at once, without rich."""
    stream = sys.stdout
    if stderr:
        stream = sys.stderr
    print(printable(str(text), keep="\n"), file=stream, flush=True)


def print_status(text: str) -> None:
    """Print the current action on stderr at once. stdout is for results only."""
    print_text(f"onepolicy: {printable(text)}", stderr=True)


def print_error(text: object) -> None:
    """Print on stderr why a command ends."""
    print_message(f"onepolicy: {text}")


def print_message(text: str) -> None:
    """Print a message on stderr, of which only the first line begins at the margin.

    It may quote a stranger's text, whose lines could else be read as lines of ours.
    """
    print_text(re.sub(r"\n(?=\S)", "\n  ", text), stderr=True)


def escape_logs() -> None:
    """Escape the logs and warnings of libraries, which may quote a stranger's file."""
    logging.setLogRecordFactory(_PrintableRecord)
    warnings.formatwarning = _format_warning


class _PrintableRecord(logging.LogRecord):
    """A line of any library's log. Its colours are dropped, other control characters escaped."""

    def getMessage(self) -> str:
        return printable_lines(COLOURS.sub("", super().getMessage()), keep="\n\t")


_FORMAT_WARNING = warnings.formatwarning


def _format_warning(*warning: Any, **more: Any) -> str:
    return printable_lines(_FORMAT_WARNING(*warning, **more), keep="\n\t")


class Console(rich.console.Console):
    """rich's console for tables, bars and styled text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print one line. A line end in the text is escaped.

        In a terminal it goes on in the next line after a word. A word longer than a line is whole,
        so that a path can be copied. Elsewhere, as in a log file, it is never wrapped.
        """
        line = printable(text)
        if self.is_terminal:
            line = textwrap.fill(
                line,
                self.width,
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
        self.print(Text(line), style=style, soft_wrap=True)

    def status(self, status: RenderableType, **options: Any) -> Status:
        """Return rich's spinner with a text beside it, which is no markup."""
        if isinstance(status, str):
            status = Text(status)
        return super().status(status, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape the text of a rendering. rich's own control codes are segments of another kind.

        Cells of tables and the lines of bars pass here too, before they are cut to their width.
        """
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, keep="\n"), segment.style)


@contextmanager
def status_printer(command: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows each stage of a command on stderr.

    In a terminal the stage is beside a spinner, otherwise it is a line.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: print_status(f"{command}: {text}")
        return
    with console.status(command) as status:
        yield lambda text: status.update(Text(text))


def make_table(*header: str, **options: Any) -> Table:
    """Return a table whose cells go on in the next line where they do not fit, and are never cut.

    options: of rich's Table.
    """
    return Table(*(Column(name, overflow="fold") for name in header), **options)


def make_bars(console: Console, *columns: ProgressColumn, transient: bool = True) -> Progress:
    """Return progress bars behind the names of their tasks, which only a terminal shows.

    columns: right of the bar. transient: the bars vanish at their end.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        *columns,
        console=console,
        transient=transient,
        disable=not console.is_terminal,
    )
