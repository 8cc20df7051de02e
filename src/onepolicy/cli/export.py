"""`onepolicy export`: write the model of a checkpoint for an engine or the hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from onepolicy.cli.common import (
    CHECKPOINTS,
    Commands,
    add_command,
    prepare_process,
    print_status,
)
from onepolicy.config import UsageError
from onepolicy.config.output_paths import check_output_path


def add_export(commands: Commands) -> None:
    """Add the command `export`."""
    export = add_command(
        commands,
        "export",
        "write the model of a checkpoint in bfloat16, for an engine or the hub",
        run_export,
        examples=(
            "onepolicy export runs/quickstart --out policy",
            "onepolicy export runs/quickstart/checkpoints/step_00010 --out policy --dtype float32",
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
    import torch

    from onepolicy.train.checkpoint import latest_checkpoint
    from onepolicy.train.export import export_checkpoint

    if (folder / CHECKPOINTS).is_dir():
        folder = latest_checkpoint(folder)
    print_status(f"exporting {folder} in {arguments.dtype}")
    size = export_checkpoint(folder, out, getattr(torch, arguments.dtype))
    print_status(f"{size / 1e9:.3f} GB of weights written")
    print(out)
