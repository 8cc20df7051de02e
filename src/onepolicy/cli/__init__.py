"""The command line: train, compare, eval, make-policy, measure, audit, engine, plan, export...

Bad input ends with a message and exit status 2.
"""

from __future__ import annotations

import argparse
import errno

from onepolicy.cli.audit import add_audit, repeat_columns
from onepolicy.cli.compare import add_compare
from onepolicy.cli.engine import add_engine
from onepolicy.cli.evaluate import add_eval
from onepolicy.cli.export import add_export
from onepolicy.cli.gateway import add_gateway
from onepolicy.cli.make_policy import add_make_policy
from onepolicy.cli.measure import add_measure
from onepolicy.cli.parser import SETTINGS, Parser
from onepolicy.cli.plan import add_plan
from onepolicy.cli.process import (
    report_interrupt,
    report_sigterm,
    stdout_error,
    tolerant_streams,
)
from onepolicy.cli.show_config import add_config
from onepolicy.cli.train import add_train
from onepolicy.config import ServiceUnavailable, TrainingError, UsageError, printable
from onepolicy.console import print_error
from onepolicy.files import DISK_FULL

COMMANDS = (
    *(add_train, add_compare, add_eval, add_make_policy, add_measure),
    *(add_audit, add_engine, add_gateway, add_plan, add_export, add_config),
)
"""Functions that add the commands, in the order of the help."""
RESULT_IN_FILES = ("train", "compare", "make-policy", "export")
"""Commands whose exit status does not depend on stdout: their results are files."""
EXIT_CODES = """\
exit codes:
  0    done (measure, eval and audit, but for --fail-on: with any result)
  1    started, then failed: a run that stopped, bits that differ (--numerics on-policy),
       a failed engine check or --conformance, a finding that audit --fail-on names, a plan
       that does not fit, output that could not be written
  2    a mistake in the command, a setting, a path or the data; the message names it and the fix
  75   a server or cluster does not answer yet; the same command may work later
       (train --restarts tries again)
  130  stopped by Ctrl-C
"""
PATH_ERRORS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
PATH_ERRNOS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
"""Errors of the file system that a wrong path causes. They are mistakes in the command."""
RUST_PANIC = "pyo3_runtime"
"""Module of the class of a crash in tokenizers or safetensors. It cannot be imported."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    with tolerant_streams():
        try:
            arguments = parse_arguments(argv)
        except SystemExit as end:  # argparse printed help, or explained a mistake
            error = stdout_error()
            if end.code or error is None:
                raise
            return _report_lost_output(error)
        with report_sigterm(arguments):
            status = _run(arguments)
        error = stdout_error()
        if error is None or status != 0:
            return status
        lost = _report_lost_output(error)
        if arguments.command in RESULT_IN_FILES:
            return status
        return lost


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments) or 0)
    except UsageError as error:
        print_error(error)
        if isinstance(error, ServiceUnavailable):
            return ServiceUnavailable.EXIT
        return 2
    except TrainingError as error:
        print_error(error)
        return 1
    except OSError as error:
        return _report_os_error(error)
    except KeyboardInterrupt:
        return report_interrupt(arguments)
    except BaseException as error:
        if type(error).__module__ != RUST_PANIC:
            raise
        print_error(f"a library crashed: {error}; is the tokenizer sound?")
        return 1


def _report_os_error(error: OSError) -> int:
    disk_failed = error.errno in (*DISK_FULL, errno.EIO)
    if error.errno is None or (error.filename is None and not disk_failed):
        raise error
    path = printable(str(error.filename or "a file"))
    fix = "check that the path is right, and who may read and write it"
    if disk_failed:
        fix = "make room there (or mend the disk) and repeat the command"
    print_error(f"{path}: {error.strerror}; {fix}")
    if isinstance(error, PATH_ERRORS) or error.errno in PATH_ERRNOS:
        return 2
    return 1


def _report_lost_output(error: str) -> int:
    print_error(f"stdout: {error}; some of the output is lost")
    return 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the arguments. Settings may follow options, which argparse alone would refuse."""
    top = build_parser()
    if any("\0" in word for word in argv or ()):
        top.error("an argument has a NUL character in it")
    arguments, rest = top.parse_known_args(argv)
    takes_settings = hasattr(arguments, "overrides")
    if rest and (not takes_settings or not all(map(_is_setting, rest))):
        if getattr(arguments, "columns", None) and all(map(_is_setting, rest)):
            top.exit_with_error(repeat_columns(rest))
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def build_parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(
        prog="onepolicy",
        description=(
            "RL for LLMs with one policy: measure, remove and correct the rollout/training "
            "mismatch."
        ),
        epilog=f"{SETTINGS}\n{EXIT_CODES}",
    )
    commands = top.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )
    for add in COMMANDS:
        add(commands)
    return top
