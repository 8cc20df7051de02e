"""Checkpoints: model and tokenizer in transformers' layout, optimiser and RNG as safetensors, the rest as JSON.

Learners on several ranks keep optimiser and RNG in `shards/`, a file or more per rank (sharded/shards.py).

A checkpoint is written into a temporary folder and renamed into place, so a folder named step_NNNNN is complete or does
not exist; `state.json` lists every file with its size and SHA-256, so a folder damaged later is noticed too. Nothing
is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.config.shapes import State, read_object
from onepolicy.interfaces import Learner
from onepolicy.train.optim import MASTER
from onepolicy.train.state import SHARDS, CheckpointedLearner, optimizer_moments, sharded_like

FOLDER = "checkpoints"
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
CRITIC = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer.safetensors"
STATE_CHECKSUM = "sha256 of the rest"  # field of state.json
HASHING = 4  # files at a time
READ = ("*.safetensors", "*.index.json", "*.bin", "adapter_config.json")
"""Files that transformers, vLLM or SGLang would load weights from, whether they are listed or not."""
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
    """Write the checkpoint of `step` (optimiser steps taken so far); `extra` is kept in state.json.

    Sharded learners write in the background: it is there once `learner.finish_saving()` has returned.
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
        tokenizer.save_pretrained(temporary)
        learner.save(temporary, partial(_finish, temporary, final, state))
    except (OSError, SafetensorError):  # a disk that is full needs the room
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _finish(temporary: Path, final: Path, state: dict[str, Any]) -> None:
    """All files are written: say which, and give the folder its name."""
    written = sorted(path for path in temporary.rglob("*") if path.is_file())
    names = [str(path.relative_to(temporary)) for path in written]
    files = {name: path.stat().st_size for name, path in zip(names, written, strict=True)}
    sums = dict(zip(names, _sums(written), strict=True))
    state = {**state, "files": files, "sha256": sums}
    (temporary / STATE).write_text(
        json.dumps(state | {STATE_CHECKSUM: _own_sum(state)}, indent=1), encoding="utf-8"
    )
    for path in [*temporary.rglob("*"), temporary]:
        _sync(path)
    os.rename(temporary, final)
    _sync(final.parent)


def write_files(learner: CheckpointedLearner, folder: Path) -> None:
    """Weights in transformers' layout, optimiser and critic, of a learner that is not sharded."""
    learner.model.save_pretrained(folder)
    _write_index(folder)
    save_file(
        {"rng": torch.get_rng_state()} | optimizer_moments(learner.model, learner.optimizer),
        folder / OPTIMIZER,
    )
    if learner.critic is not None:
        critic = learner.critic
        save_file(critic.values.state_dict(), folder / CRITIC)
        save_file(optimizer_moments(critic.values, critic.optimizer), folder / CRITIC_OPTIMIZER)


def _write_index(folder: Path) -> None:
    """Which file holds the model. Without an index vLLM and SGLang load every safetensors file of a folder."""
    index, model = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        with safe_open(model, "pt") as file:
            weight_map = dict.fromkeys(file.keys(), model.name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints (0: keep all)."""
    for path in complete_checkpoints(run)[:-keep] if keep else []:
        doomed = path.with_name(
            f".{path.name}.deleting"
        )  # renamed first: a kill leaves no half checkpoint behind
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def remove_unfinished(run: Path) -> None:
    """Remove what a process left behind that was killed while it wrote or deleted a checkpoint."""
    for path in [*(run / FOLDER).glob(".step_*.writing"), *(run / FOLDER).glob(".step_*.deleting")]:
        _remove(path)


def _remove(path: Path) -> None:
    """What has a name that only unfinished checkpoints have, be it a folder, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def complete_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first. Folders of an interrupted save carry another name."""
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        raise UsageError(f"{folder}: not a folder, which checkpoints are in; move it away")
    found = (
        [p for p in folder.iterdir() if re.fullmatch("step_[0-9]+", p.name)]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def latest_checkpoint(run: Path) -> Path:
    if not run.is_dir():
        raise UsageError(f"{run}: no such run folder")
    found = complete_checkpoints(run)
    if not found:
        raise UsageError(
            f"{run}: no complete checkpoint in {run / FOLDER}; start the run anew in another folder"
        )
    return found[-1]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's state.json. UsageError if it is missing or damaged."""
    path = checkpoint / STATE
    if os.path.lexists(checkpoint) and not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: not a folder, which a checkpoint is; move it away")
    if not checkpoint.is_dir():
        there = ", ".join(sorted(each.name for each in checkpoint.parent.glob("step_*"))) or "none"
        raise UsageError(f"{checkpoint}: no such checkpoint; there is {there}")
    if not path.is_file():
        raise UsageError(f"{checkpoint}: half written (no {STATE}); {HINT}")
    state = read_object(path, State, HINT)
    named = re.fullmatch("step_([0-9]+)", checkpoint.name)
    if named and int(named[1]) != state["step"]:
        raise UsageError(
            f"{path}: step is {state['step']}, but the folder is {checkpoint.name}; {HINT}"
        )
    for name in (*state["files"], *state.get("sha256", ())):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise UsageError(f"{path}: names {name!r}, which is not in this folder; {HINT}")
    own = state.pop(STATE_CHECKSUM, None)
    if own is not None and own != _own_sum(state):
        raise UsageError(f"{path}: damaged, it is not what was written; {HINT}")
    return state


def verify(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's state.json, after checking that every file it lists is there, with the bytes that were written,
    and no other that weights would be read from.

    Reads all files once. A checkpoint of an older version has no checksums: of that, sizes are checked.
    """
    state = read_state(checkpoint)
    there = {
        str(path.relative_to(checkpoint)) for pattern in READ for path in checkpoint.rglob(pattern)
    }
    if others := sorted(there - state["files"].keys()):
        raise UsageError(
            f"{checkpoint}: {', '.join(others)}: not written with this checkpoint, but weights would be read from it; "
            "move it out of the folder"
        )
    if unlisted := sorted(state.get("sha256", {}).keys() - state["files"].keys()):
        raise UsageError(
            f"{checkpoint / STATE}: has a checksum of {unlisted[0]}, which it does not list; {HINT}"
        )
    for name, size in state["files"].items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if found != size:
            raise UsageError(f"{checkpoint / name}: half written ({found} of {size} bytes); {HINT}")
    sums = state.get("sha256", {})
    for name, found in zip(sums, _sums([checkpoint / name for name in sums]), strict=True):
        if found != sums[name]:
            raise UsageError(
                f"{checkpoint / name}: damaged, its bytes are not those that were written; {HINT}"
            )
    return state


def _sums(paths: list[Path]) -> list[str]:
    """SHA-256 of every file."""
    with ThreadPoolExecutor(HASHING) as pool:  # hashing lets other threads run
        return list(pool.map(_sum, paths))


def _own_sum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def restore_optimizer(checkpoint: Path, learner: CheckpointedLearner) -> None:
    """Optimiser moments, RNG and version as they were when the checkpoint was written; weights are loaded elsewhere.

    The critic's weights come from here; a fork of a run without one starts its critic anew.
    """
    if (checkpoint / SHARDS).is_dir():
        from onepolicy.train.sharded import shards

        shards.restore(checkpoint, learner)
    else:
        _restore_files(checkpoint, learner)
    state = read_state(checkpoint)
    learner.version, learner.updates, learner.skipped = (
        state["step"],
        state["updates"],
        state.get("skipped", 0),
    )


def _restore_files(checkpoint: Path, learner: CheckpointedLearner) -> None:
    tensors = load_file(checkpoint / OPTIMIZER)
    torch.set_rng_state(tensors.pop("rng"))
    _restore(tensors, learner.model, learner.optimizer, checkpoint / OPTIMIZER)
    if learner.critic is not None and (checkpoint / CRITIC).is_file():
        weights = load_file(checkpoint / CRITIC)
        learner.critic.load(weights, str(checkpoint / CRITIC))
        moments = load_file(checkpoint / CRITIC_OPTIMIZER)
        _restore(
            moments, learner.critic.values, learner.critic.optimizer, checkpoint / CRITIC_OPTIMIZER
        )


def _restore(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> None:
    parameters = dict(model.named_parameters())
    for full, value in tensors.items():
        key, _, name = full.partition("/")
        if name not in parameters:
            raise UsageError(f"{path}: optimiser state for {name}, which the model does not have")
        parameter = parameters[name]
        if key == MASTER and parameter.dtype == torch.float32:  # a fork may change model.dtype
            continue
        value = value.to(parameter.device, torch.float32)
        optimizer.state[parameter][key] = value if key == "step" else sharded_like(parameter, value)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
