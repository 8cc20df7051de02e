"""The parts that all commands share: help texts, status lines, and settings from before torch."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from packaging.requirements import Requirement
from packaging.version import Version

from onepolicy.cli.parser import Parser
from onepolicy.config import Frozen, UsageError
from onepolicy.config.idle import Idle, describe_idle
from onepolicy.console import escape_logs, print_message, print_status

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
"""The commands of a parser, to which each module adds its own."""
RUN_ONLY = ("out", "steps")
"""Settings that only a training run uses."""
TRAIN_EXTRA = (
    "torch>=2.11",
    "transformers>=5.19,<6",
    "safetensors>=0.5",
    "numpy>=1.26",
    "pydantic>=2.11",
    "rich>=13.9",
    "tomlkit>=0.13",
)
"""The extra's requirements, as in pyproject.toml."""
CHECKPOINTS, RUN_FILE = "checkpoints", "run.json"
"""Names in a run folder, as in run/run_folder.py, which loads torch."""


def add_command(
    commands: Commands,
    name: str,
    text: str,
    run: object,
    *,
    examples: Sequence[str],
    settings: type[Frozen] | None = None,
    ignored: Sequence[str] = (),
) -> Parser:
    """Add a command.

    settings: the config that `a.b=value` changes. ignored: settings of it without effect here.
    """
    command = commands.add_parser(name, help=text, description=text)
    assert isinstance(command, Parser)
    command.set_help(examples=examples, settings=settings, ignored=ignored)
    command.set_defaults(run=run)
    return command


def refuse_model_path(overrides: list[str], command: str) -> None:
    """Raise UsageError if model.path is set for a command that loads a checkpoint."""
    for override in overrides:
        if override.startswith("model.path="):
            raise UsageError(
                f"{override}: has no effect, {command} uses the weights of its checkpoint; leave "
                "it out"
            )


def warn_idle(settings: Iterable[Idle], overrides: Sequence[str] | None = None) -> None:
    """Write one line on stderr for settings that change nothing, if there are any.

    overrides: only those that these overrides set; None: all.
    """
    found = list(settings)
    if overrides is not None:
        names = [override.partition("=")[0] for override in overrides]
        found = [each for each in found if is_set_by(each.setting, names)]
    if found:
        print_status(describe_idle(found))


def is_set_by(setting: str, names: Sequence[str]) -> bool:
    """Return whether overrides with these names set a setting, or a section that it is in."""
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


class _StderrHandler(logging.Handler):
    """The library's log as lines on stderr.

    It looks up sys.stderr for every line, because progress bars replace it while they are shown.
    """

    def emit(self, record: logging.LogRecord) -> None:
        print_message(self.format(record))


def prepare_process(threads: int | None) -> None:
    """Set everything that torch reads when it is imported, then import transformers.

    OpenMP threads must not spin: that starves every other process of the machine. Raises UsageError
    if the extra `train` is not installed.
    """
    check_train_extra()
    escape_logs()
    logger = logging.getLogger("onepolicy")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print_status("loading torch and transformers")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # onepolicy shows its own


def check_train_extra(requirements: Sequence[str] = TRAIN_EXTRA) -> None:
    """Raise UsageError if a package is missing or of a version that the commands do not run on.

    Only releases are compared: 2.13.0a0+gitabc of a vendor's container counts as 2.13. Nothing is
    imported.
    """
    problems = [found for found in map(_problem, requirements) if found is not None]
    if problems:
        raise UsageError(
            f"this command needs {'; '.join(problems)}; pip install 'onepolicy[train]', in a "
            "venv of its own if your trainer pins other versions. The library (import onepolicy) "
            "and `onepolicy audit` run on what is installed"
        )


def _problem(requirement: str) -> str | None:
    """Return `torch>=2.11 (2.6.0 is installed)`, None if the requirement is met."""
    wanted = Requirement(requirement)
    try:
        installed = version(wanted.name)
    except PackageNotFoundError:
        return f"{requirement} (not installed)"
    if wanted.specifier.contains(Version(installed).base_version):
        return None
    return f"{requirement} ({installed} is installed)"
