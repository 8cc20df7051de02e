"""Trackers that metrics go to beside the run's own files: TensorBoard, Weights & Biases, trackio.

A tracker is opened with the run folder and the last step that it has, as a context manager that
yields `write(step, values)`. W&B and trackio may fail, or their network may: a run names that once
and goes on without them, for metrics.jsonl has every row.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType

from onepolicy.config import RunConfig, UsageError
from onepolicy.config.secrets import without_secrets
from onepolicy.run.run_folder import RUN

Note = Callable[[str], None]
Write = Callable[[int, Mapping[str, float]], None]
OpenTracker = Callable[[Path, int], AbstractContextManager[Write]]
# setting of `log` -> the package that it needs, and onepolicy's extra that brings it
PACKAGES = {
    "report": ("plotly", "report"),
    "tensorboard": ("tensorboard", "report"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}

LONGEST_FINISH_S = 120.0  # W&B's own default is to wait for a lost network without end


def check_log(config: RunConfig) -> None:
    """Raise UsageError at the start for a missing package, or for W&B without an API key."""
    for setting, (package, extra) in PACKAGES.items():
        if getattr(config.log, setting) and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"log.{setting}: needs {package}, which is not installed; "
                f"pip install 'onepolicy[{extra}]' or set {_turned_off(setting)}"
            )
    if config.log.wandb:
        _log_in_to_wandb()


def trackers_of(config: RunConfig, note: Note) -> list[OpenTracker]:
    """Return the trackers that a run's settings name. note: prints a line for the user."""
    found: list[OpenTracker] = []
    if config.log.tensorboard:
        found.append(tensorboard)
    if config.log.wandb:
        found.append(partial(_Apart, "wandb", partial(wandb_run, config), note))
    if config.log.trackio:
        found.append(partial(_Apart, "trackio", partial(trackio_run, config), note))
    return found


@contextmanager
def tensorboard(folder: Path, last_step: int) -> Iterator[Write]:
    """Open TensorBoard's log in the run folder. Steps that run again replace their old values."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1) as writer:

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextmanager
def wandb_run(config: RunConfig, folder: Path, last_step: int) -> Iterator[Write]:
    """Open a run of Weights & Biases, the same one after a resume.

    W&B keeps its first value of a step, so steps that run again after a crash stay as they were.
    """
    wandb = _wandb()
    run = wandb.init(
        project=config.log.wandb,
        name=folder.name,
        id=_run_id(folder),
        resume="allow",
        dir=folder,
        config=without_secrets(config.model_dump(mode="json")),
        settings=wandb.Settings(finish_timeout=LONGEST_FINISH_S),
    )
    with _finished(run.finish):
        yield lambda step, values: run.log(dict(values), step=step)


@contextmanager
def trackio_run(config: RunConfig, folder: Path, last_step: int) -> Iterator[Write]:
    """Open a run of trackio, the same one after a resume.

    trackio keeps every value of a step, so a step that runs again after a crash is there twice.
    """
    import trackio

    assert config.log.trackio is not None
    name = f"{folder.name}-{_run_id(folder)}"
    settings = without_secrets(config.model_dump(mode="json"))
    trackio.init(project=config.log.trackio, name=name, config=settings, resume="allow")
    try:
        yield lambda step, values: trackio.log(dict(values), step=step)
    finally:
        trackio.finish()


@contextmanager
def _finished(finish: Callable[[int], None]) -> Iterator[None]:
    """Finish a run of W&B with exit code 1 if the block fails, else 0."""
    try:
        yield
    except BaseException:
        finish(1)
        raise
    finish(0)


class _Apart:
    """A tracker whose failure is noted once and does not end the run."""

    def __init__(
        self, name: str, tracker: OpenTracker, note: Note, folder: Path, last_step: int
    ) -> None:
        self._name, self._note, self._lost = name, note, False
        self._tracker = tracker(folder, last_step)
        self._write: Write | None = None

    def __enter__(self) -> Write:
        with self._guarded():
            self._write = self._tracker.__enter__()
        return self.write

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if not self._lost:
            assert self._write is not None
            with self._guarded():
                self._write(step, values)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._lost:
            with self._guarded():
                try:
                    self._tracker.__exit__(kind, error, trace)
                except BaseException as raised:
                    if raised is not error:  # the run's own error goes on by itself
                        raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a package may raise anything; metrics.jsonl has every row
            self._lost = True
            self._note(f"WARNING: log.{self._name}: {error!r}; the run goes on without it")


def _run_id(folder: Path) -> str:
    """Return what no other run has and a resumed run keeps: run.json's id.

    Runs from before there was one have a digest of folder and file.
    """
    text = (folder / RUN).read_bytes()
    known = json.loads(text).get("id")
    return known or hashlib.sha256(str(folder.resolve()).encode() + text).hexdigest()[:8]


def _turned_off(setting: str) -> str:
    if setting in ("report", "tensorboard"):
        return f"log.{setting}=false"
    return f"no log.{setting}"


def _wandb() -> ModuleType:
    """Return W&B's package. It does not report its own errors to its makers."""
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # read as it is imported
    import wandb

    return wandb


def _log_in_to_wandb() -> None:
    """Ask for the API key of W&B where a person can answer, before anything is loaded."""
    wandb = _wandb()
    if wandb.setup().settings.mode in ("offline", "disabled"):
        return
    try:
        wandb.login(verify=False)  # a key is enough; without a network the run goes on, see _Apart
    except wandb.errors.Error as error:
        raise UsageError(
            f"log.wandb: {error}; run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline "
            "to send the run later by `wandb sync`"
        ) from None
