"""`onepolicy audit`: the rollout/training mismatch in another framework's dump."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from onepolicy.cli.common import Commands, add_command
from onepolicy.config import UsageError
from onepolicy.config.base import LARGEST_FLOAT
from onepolicy.config.output_paths import check_output_folder
from onepolicy.config.presets import framework_names
from onepolicy.console import Console, print_status
from onepolicy.nonfinite import Nonfinite
from onepolicy.verdict.declared import Action, Format

FAILURES = tuple(action for action in get_args(Action) if action != "nothing")


def add_audit(commands: Commands) -> None:
    """Add the command `audit`."""
    audit = add_command(
        commands,
        "audit",
        "find mismatch or bugs in another framework's dump: a verdict",
        run_audit,
        examples=(
            "onepolicy audit dump.parquet --out runs/audited",
            "onepolicy audit dump.parquet --columns logp_trainer=old_log_probs",
            "onepolicy audit before.jsonl after.jsonl",
            "onepolicy audit --conformance conformance",
        ),
    )
    audit.add_argument(
        "dump",
        type=Path,
        nargs="?",
        help=".parquet, .jsonl, .npz, .safetensors, .pt or a folder; docs/audit.md",
    )
    audit.add_argument("other", type=Path, nargs="?", help="a second dump, shown side by side")
    audit.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="a column of ours under another name (repeatable); or the names of a framework's "
        "own files: prime-rl, nemo-rl",
    )
    audit.add_argument(
        "--from",
        dest="framework",
        metavar="FRAMEWORK",
        help="the trainer of the dump, in whose settings the advice is given too: "
        f"{', '.join(framework_names())} (default: the one that the dump or --columns names)",
    )
    audit.add_argument(
        "--format",
        choices=get_args(Format),
        help="the coarsest number format of either side: how large a sound gap may be "
        "(default: bfloat16; a run of ours says it)",
    )
    audit.add_argument(
        "--nonfinite",
        choices=get_args(Nonfinite),
        default="skip",
        help="tokens inside the mask with a value that is NaN, infinite or null: leave them out "
        "and count them, or refuse the dump (default: skip)",
    )
    audit.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write FOLDER/audit.html, audit.json and figures/*.json",
    )
    audit.add_argument(
        "--png",
        action="store_true",
        help="and figures/*.png (with kaleido, in the system's Chromium)",
    )
    _add_pipelines(audit)
    _add_limits(audit)


def _add_pipelines(audit: argparse.ArgumentParser) -> None:
    audit.add_argument(
        "--conformance",
        type=Path,
        metavar="KIT",
        help="audit the dumps of the conformance kit and compare with its expected verdicts; "
        "docs/audit.md",
    )
    audit.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=FAILURES,
        help="end with exit status 1 if the verdict on a dump is this one (repeatable), as a "
        "training pipeline's check",
    )


def _add_limits(audit: argparse.ArgumentParser) -> None:
    audit.add_argument(
        "--memory-limit",
        type=_positive,
        metavar="GIB",
        help="memory for reading the files, which are read in a child process "
        "(default: 1 GiB, and 16 times the largest file)",
    )
    audit.add_argument(
        "--time-limit",
        type=_positive,
        metavar="SECONDS",
        help="time for reading the files (default: 60 s, 4 s of a CPU's, and 4 s a MiB)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= LARGEST_FLOAT:
        raise ValueError
    return value


_positive.__name__ = "number above 0"  # in argparse's message


def repeat_columns(pairs: Sequence[str]) -> str:
    """Return the error for more pairs after one --columns."""
    repeated = " ".join(f"--columns {pair}" for pair in pairs)
    return f"--columns takes one pair; repeat it: {repeated}"


def run_audit(arguments: argparse.Namespace) -> int:
    """Audit one dump, or two side by side, or the conformance kit."""
    if arguments.conformance is not None:
        return _check_kit(arguments)
    if arguments.dump is None:
        raise UsageError("audit: no dump; give a file or folder, or --conformance KIT")
    if arguments.out is not None:
        check_output_folder("--out", arguments.out)
    paths = [path for path in (arguments.dump, arguments.other) if path is not None]
    pairs = [str(path) for path in paths if "=" in path.name and not path.exists()]
    if arguments.columns and pairs:
        raise UsageError(repeat_columns(pairs))
    print_status(f"reading {' and '.join(map(str, paths))}")
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(f"{path}: no such file; give a dump, or a folder of dumps")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    print_status("loading torch")
    from onepolicy.audit import run
    from onepolicy.record import read, schema

    columns = schema.parse_columns(arguments.columns)
    named = [arguments.framework, *(each for each in arguments.columns if "=" not in each)]
    results = run.run_audit(
        paths,
        columns,
        arguments.out,
        Console(),
        png=arguments.png,
        nonfinite=arguments.nonfinite,
        number_format=arguments.format,
        limits=read.ReadLimits(arguments.memory_limit, arguments.time_limit),
        framework=next(filter(None, named), ""),
    )
    return int(any(result.verdict.action in arguments.fail_on for result in results))


def _check_kit(arguments: argparse.Namespace) -> int:
    """Print each dump's expected and found verdict. Return 1 if any differs."""
    given = [arguments.dump, arguments.out, arguments.columns, arguments.png, arguments.format]
    given += [arguments.memory_limit, arguments.time_limit, arguments.framework, arguments.fail_on]
    if any(given) or arguments.nonfinite != "skip":
        raise UsageError(
            "--conformance: takes no dump, --columns, --from, --format, --nonfinite, --fail-on, "
            "--out, --png or limits beside it"
        )
    print_status(f"auditing the dumps of {arguments.conformance}")
    from onepolicy.audit import conformance

    outcomes = conformance.check_conformance(arguments.conformance)
    conformance.print_outcomes(Console(), outcomes)
    return int(not all(outcome.conforms for outcome in outcomes))
