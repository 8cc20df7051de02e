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
from onepolicy.console import print_text
from onepolicy.notation import number


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
    import torch

    from onepolicy.train.checkpoint import latest_checkpoint

    if (folder / CHECKPOINTS).is_dir():
        folder = latest_checkpoint(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    if arguments.adapter or is_adapter:
        size = _export_lora(folder, out, arguments)
    else:
        from onepolicy.train.export import export_checkpoint

        print_status(f"exporting {folder} in {arguments.dtype}")
        size = export_checkpoint(folder, out, getattr(torch, arguments.dtype))
    print_status(f"{size / 1e9:.3f} GB of weights written")
    print_text(out)


def _export_lora(folder: Path, out: Path, arguments: argparse.Namespace) -> int:
    """Write an adapter, alone or merged into its base. Return the bytes of the weights."""
    from onepolicy.models.load import DTYPES
    from onepolicy.models.lora import NF4, read_header
    from onepolicy.train.adapter_export import export_adapter, export_merged

    if arguments.adapter:
        print_status(f"exporting the adapter of {folder}")
        size = export_adapter(folder, out)
        if NF4 in read_header(folder):
            print_status("it was trained on its base in nf4, and is another policy on any other")
        return size
    print_status(f"merging the adapter of {folder} into its base in {arguments.dtype}")
    size, loss = export_merged(folder, out, DTYPES[arguments.dtype])
    if NF4 in read_header(folder):
        print_status("its base was in nf4: the model written holds what that dequantises to")
    print_status(
        f"the adapter moves the log-probabilities of a fixed batch by {number(loss.effect)} nats; "
        f"merged into {arguments.dtype} it moves them {number(loss.lost)} nats otherwise"
    )
    return size
