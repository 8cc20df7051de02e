"""`onepolicy make-policy`: make and warm up the tiny policy."""

from __future__ import annotations

import argparse
from pathlib import Path

from onepolicy.cli.common import Commands, add_command, prepare_process, warn_idle
from onepolicy.config.idle import idle_settings
from onepolicy.config.input_files import check_task_files
from onepolicy.config.load import resolve_as
from onepolicy.config.output_paths import check_output_path
from onepolicy.config.policy import PolicyConfig
from onepolicy.console import print_status


def add_make_policy(commands: Commands) -> None:
    """Add the command `make-policy`."""
    policy = add_command(
        commands,
        "make-policy",
        'make and warm up the tiny MoE policy of `model.path = "tiny"`',
        run_make_policy,
        examples=(
            "onepolicy make-policy",
            "onepolicy make-policy --out runs/policy task.kind=gym task.name=chain_sum steps=400",
        ),
        settings=PolicyConfig,
    )
    policy.add_argument("--out", help="folder to write to (default: the user's cache)")
    policy.add_argument(
        "overrides",
        nargs="*",
        metavar="a=value",
        help="e.g. task.kind=gym task.name=chain_sum steps=400 seed=1",
    )


def run_make_policy(arguments: argparse.Namespace) -> None:
    """Make the policy and write it to --out or the user's cache."""
    print_status("reading the settings of the policy")
    config = resolve_as(PolicyConfig, {}, arguments.overrides)
    warn_idle(idle_settings(config))
    out: Path | None = None
    if arguments.out:
        out = Path(arguments.out)
        check_output_path("--out", out)
    check_task_files(config.task)
    prepare_process(config.threads)
    from onepolicy.run.make_policy import make_policy

    make_policy(config, out)
