"""`onepolicy export` once torch is loaded."""

from __future__ import annotations

from pathlib import Path

from onepolicy.console import print_status, print_text
from onepolicy.models.load import DTYPES
from onepolicy.models.lora import NF4, read_header
from onepolicy.notation import number
from onepolicy.train import checkpoint
from onepolicy.train.adapter_export import export_adapter, export_merged
from onepolicy.train.export import export_checkpoint


def export(folder: Path, out: Path, dtype: str, *, adapter: bool) -> None:
    """Write the model of a checkpoint, or of a run's newest, to `out`, and print that folder.

    adapter: write the adapter of a run with train.lora alone.
    """
    if (folder / checkpoint.FOLDER).is_dir():
        folder = checkpoint.latest_checkpoint(folder)
    if adapter or (folder / "adapter_config.json").is_file():
        size = _export_lora(folder, out, dtype, alone=adapter)
    else:
        print_status(f"exporting {folder} in {dtype}")
        size = export_checkpoint(folder, out, DTYPES[dtype])
    print_status(f"{size / 1e9:.3f} GB of weights written")
    print_text(out)


def _export_lora(folder: Path, out: Path, dtype: str, *, alone: bool) -> int:
    """Write an adapter, alone or merged into its base. Return the bytes of the weights."""
    if alone:
        print_status(f"exporting the adapter of {folder}")
        size = export_adapter(folder, out)
        if NF4 in read_header(folder):
            print_status("it was trained on its base in nf4, and is another policy on any other")
        return size
    print_status(f"merging the adapter of {folder} into its base in {dtype}")
    size, loss = export_merged(folder, out, DTYPES[dtype])
    if NF4 in read_header(folder):
        print_status("its base was in nf4: the model written holds what that dequantises to")
    print_status(
        f"the adapter moves the log-probabilities of a fixed batch by {number(loss.effect)} nats; "
        f"merged into {dtype} it moves them {number(loss.lost)} nats otherwise"
    )
    return size
