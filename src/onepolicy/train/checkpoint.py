"""Checkpoints of a run.

Model and tokenizer are in the layout of transformers, optimiser and RNG are safetensors, the rest
is JSON. Nothing is pickled. A learner on several ranks writes optimiser and RNG into `shards/`, at
least one file per rank (sharded/shards.py).

A checkpoint is written into a temporary folder and then renamed. So a folder named step_NNNNN is
complete. `state.json` lists every file with its size and SHA-256, so later damage is noticed too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from onepolicy.bounded import refuse_holes, refuse_pipes
from onepolicy.config import UsageError
from onepolicy.config.json_shapes import CheckpointState, read_json_object
from onepolicy.files import leads_into, refuse_links_out, sync_to_disk
from onepolicy.interfaces import Learner
from onepolicy.train.optim import MasterAdamW
from onepolicy.train.state import SHARDS, CheckpointedLearner, optimizer_moments, sharded_like

if TYPE_CHECKING:
    from onepolicy.train.lora import Adapter

FOLDER = "checkpoints"
STATE = "state.json"
ADAPTER = "adapter_model.safetensors"  # as peft names it
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
STATE_CHECKSUM = "sha256 of the rest"  # field of state.json
HASH_THREADS = 4
WEIGHT_FILES = ("*.safetensors", "*.index.json", "*.bin", "adapter_config.json")
"""Files that transformers, vLLM or SGLang would load weights from, whether listed or not."""
HINT = "delete the folder to fall back to an older checkpoint"


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step_{step:05d}"


def save(
    run: Path,
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    extra: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` and return its folder.

    step: steps taken so far. `extra` is stored in state.json. A sharded learner writes in the
    background: the folder exists once `learner.finish_saving()` has returned.
    """
    learner.finish_saving()
    final = checkpoint_folder(run, step)
    if final.exists():
        verify(final)
        return final
    temporary = final.with_name(f".{final.name}.writing")
    _remove(temporary)
    temporary.mkdir(parents=True)
    state = {"step": step, "updates": learner.updates, "skipped": learner.skipped, **extra}
    try:
        _save_tokenizer(tokenizer, temporary)
        learner.save(temporary, partial(_finish_checkpoint, temporary, final, state))
    except (OSError, SafetensorError):  # if the disk is full, the half-written files are in the way
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:  # a bare one is Rust's, of a full disk
            raise
        raise OSError(errno.EIO, str(error), str(folder)) from error


def _finish_checkpoint(temporary: Path, final: Path, state: dict[str, Any]) -> None:
    """Write state.json once all other files are written, then rename the folder to `final`."""
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    names = [str(path.relative_to(temporary)) for path in written]
    files = {name: path.stat().st_size for name, path in zip(names, written, strict=True)}
    sums = dict(zip(names, _file_checksums(written), strict=True))
    state = {**state, "files": files, "sha256": sums}
    text = json.dumps(state | {STATE_CHECKSUM: _state_checksum(state)}, indent=1)
    (temporary / STATE).write_text(text, encoding="utf-8")
    for path in [*temporary.rglob("*"), temporary]:
        sync_to_disk(path)
    os.rename(temporary, final)
    sync_to_disk(final.parent)


def write_files(learner: CheckpointedLearner, folder: Path, adapter: Adapter | None = None) -> None:
    """Write weights, optimiser and critic of a learner that is not sharded.

    adapter: written in place of the weights.
    """
    if adapter is not None:
        adapter.save(folder)
        write_index(folder, ADAPTER)
    else:
        learner.model.save_pretrained(folder)
        write_index(folder)
    rng = {"rng": torch.get_rng_state()}
    moments = optimizer_moments(learner.model, learner.optimizer)
    save_file(rng | moments, folder / OPTIMIZER)
    if learner.critic is not None:
        critic = learner.critic
        save_file(critic.values.state_dict(), folder / CRITIC)
        save_file(optimizer_moments(critic.values, critic.optimizer), folder / CRITIC_OPTIMIZER)


def write_index(folder: Path, name: str = "model.safetensors") -> None:
    """Write an index that names the file of the model, or of the adapter.

    Without an index vLLM and SGLang load every safetensors file of a model's folder, and SGLang of
    an adapter's.
    """
    index, model = folder / "model.safetensors.index.json", folder / name
    if not index.exists():
        with safe_open(model, "pt") as file:
            weight_map = dict.fromkeys(file.keys(), model.name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints. keep = 0 keeps all."""
    if not keep:
        return
    for path in complete_checkpoints(run)[:-keep]:
        # Renamed first: a process that is killed here leaves no half-deleted checkpoint.
        deleting = path.with_name(f".{path.name}.deleting")
        os.rename(path, deleting)
        shutil.rmtree(deleting)


def remove_unfinished(run: Path) -> None:
    """Remove the leftovers of a process that was killed in a save or in `prune`."""
    folder = run / FOLDER
    for path in [*folder.glob(".step_*.writing"), *folder.glob(".step_*.deleting")]:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, file or link. The name must be that of an unfinished checkpoint."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def complete_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first.

    A folder of an interrupted save has another name. Raises UsageError if `checkpoints` is no
    folder.
    """
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder}: must be a folder, for checkpoints; move it away")
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if re.fullmatch("step_[0-9]+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def refuse_elsewhere(run: Path, checkpoint: Path) -> None:
    """Raise UsageError for a checkpoint that a link makes another folder's, which may be secret."""
    if os.path.lexists(checkpoint) and not leads_into(run, checkpoint):
        raise UsageError(
            f"{checkpoint}: a link out of the run's folder; if you know what it leads to, make a "
            f"copy without links and use that: cp -rL {shlex.quote(str(run))} COPY"
        )


def latest_checkpoint(run: Path) -> Path:
    """Return the newest complete checkpoint. Raises UsageError if there is none."""
    if not run.is_dir():
        raise UsageError(f"{run}: no such run folder")
    found = complete_checkpoints(run)
    if not found:
        raise UsageError(
            f"{run}: no complete checkpoint in {run / FOLDER}; start the run anew in another folder"
        )
    refuse_elsewhere(run, found[-1])
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint's state.json. Raises UsageError if it is missing or damaged."""
    _check_folder(checkpoint)
    path = checkpoint / STATE
    state = read_json_object(path, CheckpointState, HINT)
    named = re.fullmatch("step_([0-9]+)", checkpoint.name)
    if named and int(named[1]) != state["step"]:
        raise UsageError(
            f"{path}: step is {state['step']}, but the folder is {checkpoint.name}; {HINT}"
        )
    for name in (*state["files"], *state.get("sha256", ())):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise UsageError(f"{path}: lists {name!r}, which is not in this folder; {HINT}")
    checksum = state.pop(STATE_CHECKSUM, None)
    if checksum is not None and checksum != _state_checksum(state):
        raise UsageError(f"{path}: damaged, its content differs from its checksum; {HINT}")
    return state


def _check_folder(checkpoint: Path) -> None:
    if os.path.lexists(checkpoint) and not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: a checkpoint must be a folder; move this file away")
    if not checkpoint.is_dir():
        existing = sorted(path.name for path in checkpoint.parent.glob("step_*"))
        raise UsageError(
            f"{checkpoint}: no such checkpoint; there is {', '.join(existing) or 'none'}"
        )
    if not (checkpoint / STATE).is_file():
        raise UsageError(f"{checkpoint}: half written (no {STATE}); {HINT}")


def verify(checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint's state.json after checking its files.

    Every listed file must exist with the bytes that were written. No other file may exist that
    weights would be read from. This reads all files once. A checkpoint of an older version has no
    checksums: then only sizes are checked. Raises UsageError.
    """
    state = read_state(checkpoint)
    refuse_links_out(checkpoint, "this")
    for path in checkpoint.rglob("*"):
        refuse_pipes(path)
        if path.is_file():
            refuse_holes(path, HINT)
    _check_listed(checkpoint, state)
    for name, size in state["files"].items():
        path = checkpoint / name
        found = None
        if path.is_file():
            found = path.stat().st_size
        if found != size:
            raise UsageError(f"{path}: half written ({found} of {size} bytes); {HINT}")
    checksums = state.get("sha256", {})
    found_checksums = _file_checksums([checkpoint / name for name in checksums])
    for name, checksum in zip(checksums, found_checksums, strict=True):
        if checksum != checksums[name]:
            raise UsageError(
                f"{checkpoint / name}: damaged, its bytes differ from those written; {HINT}"
            )
    return state


def _check_listed(checkpoint: Path, state: dict[str, Any]) -> None:
    """Check that no weight file and no checksum is missing from the list of files."""
    weight_files = {
        str(path.relative_to(checkpoint))
        for pattern in WEIGHT_FILES
        for path in checkpoint.rglob(pattern)
    }
    unlisted = sorted(weight_files - state["files"].keys())
    if unlisted:
        raise UsageError(
            f"{checkpoint}: {', '.join(unlisted)}: not written with this checkpoint, but weights "
            "would be read from it; move it out of the folder"
        )
    without_file = sorted(state.get("sha256", {}).keys() - state["files"].keys())
    if without_file:
        raise UsageError(
            f"{checkpoint / STATE}: has a checksum of {without_file[0]}, which it does not list; "
            f"{HINT}"
        )


def _file_checksums(paths: list[Path]) -> list[str]:
    """Return the SHA-256 of every file."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing releases the interpreter
        return list(pool.map(_file_checksum, paths))


def _file_checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_checksum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def restore_optimizer(folder: Path, learner: CheckpointedLearner) -> None:
    """Restore optimiser moments, RNG and counters as they were when the checkpoint was written.

    The critic's weights are restored too. The policy's weights are loaded elsewhere. A fork of a
    run without a critic starts with a new one.
    """
    if (folder / SHARDS).is_dir():
        from onepolicy.train.sharded import shards

        shards.restore(folder, learner)
    else:
        _restore_files(folder, learner)
    state = read_state(folder)
    learner.version = state["step"]
    learner.updates = state["updates"]
    learner.skipped = state.get("skipped", 0)


def _restore_files(folder: Path, learner: CheckpointedLearner) -> None:
    tensors = load_file(folder / OPTIMIZER)
    torch.set_rng_state(tensors.pop("rng"))
    _restore_moments(tensors, learner.model, learner.optimizer, folder / OPTIMIZER)
    critic = learner.critic
    if critic is not None and (folder / CRITIC).is_file():
        critic.load(load_file(folder / CRITIC), str(folder / CRITIC))
        path = folder / CRITIC_OPTIMIZER
        _restore_moments(load_file(path), critic.values, critic.optimizer, path)


def _restore_moments(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: MasterAdamW, path: Path
) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            raise UsageError(f"{path}: optimiser state for {name}, which the model does not have")
        parameter = parameters[name]
        if key != "step":
            value = sharded_like(parameter, value)
        optimizer.put_state(parameter, key, value)
