"""`onepolicy export`: write the model of a checkpoint for an engine or the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from onepolicy.cli.common import Commands, add_command, prepare_process
from onepolicy.config import UsageError
from onepolicy.config.output_paths import check_output_path
from onepolicy.console import print_status


def add_export(commands: Commands) -> None:
    """Add the command `export`."""
    export = add_command(
        commands,
        "export",
        "write the model of a checkpoint in bfloat16, for an engine or the hub",
        run_export,
        examples=(
            "onepolicy export runs/quickstart --out policy",
            "onepolicy export runs/quickstart/checkpoints/step_00030 --out policy --dtype float32",
            "onepolicy export runs/lora --out adapter --adapter",
        ),
    )
    export.add_argument("checkpoint", help="a checkpoint, or a run: its newest checkpoint")
    export.add_argument("--out", required=True, help="folder to write to; must not exist")
    export.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of matrices (default: bfloat16); float32 as stored, rounded in a bfloat16 run; "
        "norms and biases stay as they are",
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapter of a run with train.lora alone, as it is; without this option it "
        "is merged into its base, and what the merge loses is said",
    )


def run_export(arguments: argparse.Namespace) -> None:
    """Write the model to --out, and print that folder."""
    folder, out = Path(arguments.checkpoint), Path(arguments.out)
    print_status(f"reading {folder}")
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such checkpoint or run folder")
    check_output_path("--out", out)
    if out.exists():
        raise UsageError(f"--out: {out} already exists; name a new folder")
    prepare_process(None)
    from onepolicy.run.export_command import export

    export(folder, out, arguments.dtype, adapter=arguments.adapter)
