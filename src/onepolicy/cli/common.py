"""What every command shares: its help text, and what must be set before torch is imported."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from onepolicy.cli.parser import Parser
from onepolicy.config import Frozen, RunConfig, printable

if TYPE_CHECKING:
    from onepolicy.interfaces import Progress
    from onepolicy.launch.launcher import Launcher

RUN_ONLY = ("out", "steps")
"""Settings that only a training run has a use for."""


def command(
    commands: argparse._SubParsersAction[Any],
    name: str,
    text: str,
    run: object,
    *,
    examples: Sequence[str],
    settings: type[Frozen] | None = None,
    ignored: Sequence[str] = (),
) -> Parser:
    """Add a command. settings, ignored: what `a.b=value` sets, and which of these mean nothing here."""
    command = commands.add_parser(name, help=text, description=text)
    assert isinstance(command, Parser)
    command.describe(examples=examples, settings=settings, ignored=ignored)
    command.set_defaults(run=run)
    return command


def say(text: str) -> None:
    """Tell whoever waits what is being done: a line on stderr, at once, so that stdout holds results only."""
    print(f"onepolicy: {printable(text)}", file=sys.stderr, flush=True)


@contextmanager
def stages(command: str) -> Iterator[Callable[[str], None]]:
    """Yield what tells each stage of a command on stderr: beside a spinner in a terminal, else as a line of its own."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: say(f"{command}: {text}")
        return
    with console.status(command) as status:
        yield lambda text: status.update(escape(printable(text)))


class _Lines(logging.Handler):
    """What the library logs, as lines on stderr; looked up at every line, because live bars take it over."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(self.format(record), keep="\n"), file=sys.stderr, flush=True)


def prepare_process(threads: int | None) -> None:
    """What must be set before torch is imported. OpenMP threads that spin starve whatever else runs on the machine."""
    ours = logging.getLogger("onepolicy")
    ours.setLevel(logging.INFO)
    if not ours.handlers:
        ours.addHandler(_Lines())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    say("loading torch and transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # ours are enough


@contextmanager
def launcher_for(config: RunConfig, progress: Progress) -> Iterator[Launcher]:
    """What starts the processes of a run."""
    if config.cluster.kind == "local":
        from onepolicy.launch.launcher import LOCAL_LAUNCHER

        yield LOCAL_LAUNCHER
        return
    from onepolicy.launch.ray.connect import open_ray_launcher

    with open_ray_launcher(config, progress) as launcher:
        yield launcher
