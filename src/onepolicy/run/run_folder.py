"""The run folder: made whole or not at all, held by one process at a time, and where a resumed or forked run starts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

import onepolicy
from onepolicy.config import RunConfig, TrainingError, UsageError
from onepolicy.config.json_shapes import RunInfo, read_json_object
from onepolicy.config.output_paths import check_new_run_folder, not_writable_error
from onepolicy.config.stored_config import CONFIG, read_stored_config
from onepolicy.files import write_text_atomically
from onepolicy.invariant.fingerprint import fingerprint_differences
from onepolicy.report.jsonl import METRICS, SAMPLES
from onepolicy.train import checkpoint

Json = dict[str, Any]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RUN, SUMMARY, PROBES = "run.json", "summary.json", "probes"


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """Where a run starts: step 0 of its model, or a checkpoint."""

    step: int = 0
    weights: Path | None = None
    parent: Json | None = None  # {"run", "step"} of a fork


FROM_SCRATCH = RunOrigin()


def create_run_folder(
    out: Path, config: RunConfig, origin: RunOrigin, fingerprint: str, quant: Json | None = None
) -> None:
    """Write the folder under another name and rename it into place. quant: what the engine's quantised weights take."""
    check_new_run_folder(out)
    wanted = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        while (
            out.is_symlink()
        ):  # a link to an empty folder stays; not realpath, which leaves /proc/PID/root
            out = out.parent / os.readlink(out)
        making = out.with_name(
            f".making-{os.getpid()}"
        )  # short: the name of `out` may be as long as names can be
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        about = _about(config, origin, fingerprint) | {"quant": quant}
        (making / RUN).write_text(json.dumps(about, indent=1), encoding="utf-8")
        write_config(making, config)
        os.rename(making, out)  # an empty folder of that name is replaced
    except OSError as error:
        raise UsageError(
            f"out: cannot make {wanted}: {error.strerror}; choose another folder"
        ) from None


def write_config(run: Path, config: RunConfig) -> None:
    write_text_atomically(run / CONFIG, config.model_dump_json(indent=1))


def read_about(run: Path) -> Json:
    """run.json. UsageError if it is missing or damaged."""
    return read_json_object(
        run / RUN, RunInfo, "copy it from a run of the same kind, or start anew"
    )


def read_parent(run: Path) -> Json | None:
    return read_about(run)["parent"]


def build_difference(run: Path, fingerprint: str) -> str | None:
    """What differs from the build and processor the run began on, if that is known."""
    began = read_about(run).get("fingerprint")
    return (
        "; ".join(fingerprint_differences(fingerprint, json.dumps(began))) or None
        if began
        else None
    )


def check_layout(run: Path) -> None:
    """UsageError for a file where the run writes a folder, or the other way round."""
    for name in (checkpoint.FOLDER, PROBES, "tensorboard"):
        if os.path.lexists(run / name) and not (run / name).is_dir():
            raise UsageError(
                f"{run / name}: not a folder, which the run writes there; move it away"
            )
    for name in (RUN, SUMMARY, METRICS, SAMPLES, "report.html", ".lock"):
        if os.path.lexists(run / name) and not (run / name).is_file():
            raise UsageError(f"{run / name}: not a file, which the run writes there; move it away")


def resume_origin(run: Path) -> RunOrigin:
    """The newest complete checkpoint; before the first one, the start."""
    check_layout(run)
    parent = read_parent(run)
    if not checkpoint.complete_checkpoints(run):
        if parent is None:
            return RunOrigin()
        folder = checkpoint.checkpoint_folder(Path(parent["run"]), parent["step"])
        if not folder.is_dir():
            raise UsageError(
                f"{run}: was killed before its first checkpoint, and its parent's {folder} is gone"
            )
        return RunOrigin(parent["step"], folder, parent)
    newest = checkpoint.latest_checkpoint(run)
    return RunOrigin(checkpoint.verify(newest)["step"], newest, parent)


def fork_origin(source: Path) -> tuple[RunConfig, RunOrigin]:
    """Config and starting point of RUN/checkpoints/step_NNNNN, also written RUN/NNNNN or (newest) RUN."""
    if (source / checkpoint.FOLDER).is_dir():
        folder = checkpoint.latest_checkpoint(source)
    elif re.fullmatch("[0-9]{1,15}", source.name):
        folder = checkpoint.checkpoint_folder(source.parent, int(source.name))
    else:
        folder = source
    step = checkpoint.verify(folder)["step"]
    run = folder.resolve().parent.parent
    return read_stored_config(run), RunOrigin(
        step, folder.resolve(), {"run": str(run), "step": step}
    )


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """No second process may write this folder. The lock dies with the process, so a kill leaves nothing to clean up."""
    with ExitStack() as open_while_held:
        try:
            lock = open_while_held.enter_context((run / ".lock").open("w", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{run}: another process is training in this folder; wait for it or stop it"
            ) from None
        except OSError as error:
            raise not_writable_error(run, error.strerror) from None
        yield


@contextmanager
def convert_write_errors(run: Path) -> Iterator[None]:
    """Around what writes into the folder: a disk that is full or gone ends the run with a TrainingError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why, mend = str(error), "Make room"
        if isinstance(error, OSError) and error.strerror:
            why = error.strerror
            if error.errno not in FULL:
                mend = f"Mend that ({error.filename or run})"
        raise TrainingError(
            f"{run}: cannot be written to: {why}; what was complete is kept. {mend}, then continue with "
            f"`onepolicy train --resume {run}`{_without_checkpoint(run)}"
        ) from error


def _without_checkpoint(run: Path) -> str:
    """What a resume does where no checkpoint is complete yet, if it can be said."""
    try:
        if checkpoint.complete_checkpoints(run):
            return ""
        parent = read_parent(run)
    except (OSError, UsageError):
        return ""
    start = "step 0" if parent is None else f"step {parent['step']} of {parent['run']}"
    return f", which starts again from {start}: no checkpoint exists yet"


def drop_probes_after(run: Path, step: int) -> None:
    for path in (run / PROBES).glob("*.safetensors"):
        written = re.fullmatch(
            r"step_([0-9]+)", path.stem
        )  # a file of another name is not the run's
        if written and int(written[1]) > step:
            path.unlink()


def _about(config: RunConfig, origin: RunOrigin, fingerprint: str) -> Json:
    kl = config.objective.kl
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "parent": origin.parent,
        "kl_reference": (kl.reference or config.model.path) if kl.coef else None,
        "versions": {
            "onepolicy": onepolicy.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "fingerprint": json.loads(fingerprint),
    }
