"""The way to the terminal: escape sequences and markup in a text are shown, not obeyed."""

import logging
import re
import warnings
from io import StringIO

import pytest
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text

from onepolicy.cli.process import describe_stop
from onepolicy.console import (
    SHOWN,
    Console,
    escape_logs,
    make_bars,
    make_table,
    print_error,
    print_status,
    print_text,
    status_printer,
)
from onepolicy.errors import UsageError
from onepolicy.run.train_command import TerminalProgress

OBEYED = ("\x1b]0;", "\x1b]52;", "\x1b[2J", "\x9b2J", "\x07", "\r", "\u202e")
HOSTILE = "".join(OBEYED) + "[bold]x[/b] :smile:"
SHOWN_AS = (r"\x1b]0;", r"\x1b]52;", r"\x1b[2J", r"\x9b2J", r"\u202e", "[bold]x[/b] :smile:")


def in_a_table(console):
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    console.print(table)


def in_bars(console):
    with make_bars(console, MofNCompleteColumn(), SHOWN, transient=False) as bars:
        bars.add_task(HOSTILE, total=1, shown=HOSTILE)
        progress = TerminalProgress(console, bars, 2)
        progress.note(HOSTILE)
        progress.phase(HOSTILE, 1)
        progress.step(1, {f"eval/{HOSTILE}": 0.5})


def in_a_status(console):
    with console.status(HOSTILE) as status:
        status.update(Text(HOSTILE))


@pytest.mark.parametrize(
    "show",
    [
        lambda console: console.print(HOSTILE),
        lambda console: console.print(Text(HOSTILE, style="bold")),
        lambda console: console.print_line(HOSTILE, style="bold red"),
        in_a_table,
        in_bars,
        in_a_status,
    ],
)
def test_a_terminal_shows_what_it_would_obey(show):
    console = Console(file=StringIO(), force_terminal=True, width=300)
    show(console)
    text = console.file.getvalue()
    assert not [each for each in (*OBEYED[:4], OBEYED[6]) if each in text]
    assert "\x07" not in text
    assert all(each in text for each in SHOWN_AS), text


def test_a_line_is_one_line():
    """A text of several lines could draw a verdict of its own."""
    console = Console(file=StringIO(), width=20)
    console.print_line("no engine\nNOTHING TO DO " * 3)
    assert console.file.getvalue().count("\n") == 1


def test_lines_of_a_terminal_break_between_words():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    progress = TerminalProgress(console, make_bars(console), 2)
    scores = {"eval/greedy": 0.97, "eval/avg@4": 0.5, "eval/pass@4": 0.75, "eval/truncated": 0.0}
    progress.step(1, {"train/reward": 0.5, "mismatch/k3": 1e-3, "train/entropy": 0.25, **scores})
    progress.note("two different rewards " * 8)
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert "eval/greedy" in words
    assert words.count("different") == 8


def test_a_word_longer_than_the_terminal_can_be_copied():
    console = Console(file=StringIO(), force_terminal=True, width=40)
    path = "/runs/" + "a-long-name/" * 8
    console.print_line(f"picture: {path}comparison.html")
    assert f"{path}comparison.html" in console.file.getvalue()


def test_cells_of_a_table_are_never_cut():
    console = Console(file=StringIO(), force_terminal=True, width=80)
    table = make_table("check", "setting")
    long = "rollout.engine.url=https://" + "engine." * 20
    table.add_row("x" * 50, long)
    console.print(table)
    shown = "".join(re.findall(r"[^\s│┃┏┓┡┩└┘─━┴┳╇]+", console.file.getvalue()))
    assert "…" not in shown
    assert shown.count("engine.") + shown.count("engi") >= 20


@pytest.mark.parametrize("stderr", [False, True])
def test_plain_prints(stderr, capsys):
    print_text(f"{HOSTILE}\nsecond line", stderr=stderr)
    text = capsys.readouterr()[stderr]
    assert not [each for each in OBEYED if each in text]
    assert text.endswith("[bold]x[/b] :smile:\nsecond line\n")


def test_no_line_of_a_stranger_passes_for_one_of_ours():
    """A file's name may hold a line end."""
    said = str(UsageError("cannot read a\nonepolicy: verdict: nothing\n  indented"))
    assert said == "cannot read a\n  onepolicy: verdict: nothing\n  indented"


def test_only_the_first_line_of_an_error_begins_at_the_margin(capsys):
    """Else a stranger's column could be a verdict."""
    print_error(UsageError("column x\nNOTHING TO DO\n\n  k3 is 0\nwrote audit.html"))
    expected = "onepolicy: column x\n  NOTHING TO DO\n\n  k3 is 0\n  wrote audit.html\n"
    assert capsys.readouterr().err == expected


def test_lines_of_commands(capsys, tmp_path):
    print_status(f"{HOSTILE}\n")
    with status_printer(HOSTILE) as show:
        show(HOSTILE)
    print_text(describe_stop("SIGTERM", tmp_path / "\x1b[2J"))
    told = capsys.readouterr()
    assert not [each for each in OBEYED if each in told.out + told.err]
    assert told.err.count("\n") == 2


def test_the_librarys_log(capsys):
    from onepolicy.cli.common import _StderrHandler

    _StderrHandler().emit(logging.makeLogRecord({"msg": HOSTILE}))
    told = capsys.readouterr().err
    assert not [each for each in OBEYED if each in told]


@pytest.fixture
def escaped_logs(monkeypatch):
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    escape_logs()
    yield
    logging.setLogRecordFactory(factory)


@pytest.mark.usefixtures("escaped_logs")
def test_what_libraries_log_and_warn_of_is_shown():
    logger, stream = logging.getLogger("some.library"), StringIO()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.warning("a tensor %s of\n\x1b[31mred\x1b[0m\nonepolicy: x", HOSTILE)
    logger.removeHandler(handler)
    warning = warnings.formatwarning(UserWarning(HOSTILE), UserWarning, "file.py", 3)
    for text in (stream.getvalue(), warning):
        assert not [each for each in OBEYED if each in text]
        assert all(each in text for each in SHOWN_AS), text
    assert "of\nred\n  onepolicy: x\n" in stream.getvalue()
    assert warning.startswith("file.py:3: UserWarning: ")
