"""What every command shares: its help text, and what must be set before torch is imported."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onepolicy.config import RunConfig, printable

if TYPE_CHECKING:
    from onepolicy.loop.hosts import Hosts
    from onepolicy.loop.run import Progress

EPILOG = """\
settings:
  A recipe is a TOML file; any setting can be changed behind it as a.b=value, e.g.
    onepolicy train recipes/quickstart.toml replay.mode=off optim.lr=5e-5 out=runs/no-replay
  `onepolicy config RECIPE [a.b=value ...]` prints the effective settings, defaults included.
"""


def command(commands: argparse._SubParsersAction, name: str, text: str, run: object) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=text, description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(run=run)
    return command


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
    import transformers

    transformers.utils.logging.disable_progress_bar()  # ours are enough


@contextmanager
def hosts_of(config: RunConfig, progress: Progress) -> Iterator[Hosts]:
    """What starts the processes of a run."""
    if config.cluster.kind == "local":
        from onepolicy.loop.hosts import HERE

        yield HERE
        return
    from onepolicy.cluster.start import opened

    with opened(config, progress) as hosts:
        yield hosts
