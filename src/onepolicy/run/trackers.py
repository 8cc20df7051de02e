"""Trackers that metrics go to beside the run's own files: TensorBoard, Weights & Biases, trackio.

W&B and trackio may fail, or their network may: a run names that once and goes on without them, for
metrics.jsonl has every row.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

from onepolicy.config import RunConfig, TrainingError, UsageError
from onepolicy.config.secrets import without_secrets
from onepolicy.run.run_folder import convert_write_errors, read_about

Values = Mapping[str, float]
Note = Callable[[str], None]
Result = TypeVar("Result")
# setting of `log` -> the package that it needs, and onepolicy's extra that brings it
PACKAGES = {
    "report": ("plotly", "report"),
    "tensorboard": ("tensorboard", "report"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
}

LONGEST_FINISH_S = 120.0  # W&B's own default is to wait for a lost network without end


class Writer(Protocol):
    """A tracker that is open."""

    def write(self, step: int, values: Values) -> None:
        """Add the row of a step."""

    def close(self, failed: bool) -> None:
        """End the log. failed: the run ends by an error."""


OpenWriter = Callable[[Path, int], Writer]
"""Opens the tracker of a run folder whose log ends at this step."""


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


def trackers_of(config: RunConfig, note: Note) -> list[OpenWriter]:
    """Return the trackers that a run's settings name. note: prints a line for the user."""
    found: list[OpenWriter] = []
    if config.log.tensorboard:
        found.append(TensorBoard)
    if config.log.wandb:
        found.append(lambda folder, _: Guarded("wandb", partial(Wandb, config, folder), note))
    if config.log.trackio:
        found.append(lambda folder, _: Guarded("trackio", partial(Trackio, config, folder), note))
    return found


class TensorBoard:
    """TensorBoard's log in the run folder. Steps that run again replace their old values."""

    def __init__(self, folder: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        try:
            with convert_write_errors(self._folder):
                self._writer.close()
        except TrainingError:
            if not failed:  # a run that failed says why itself
                raise


class Wandb:
    """A run of Weights & Biases, the same one after a resume.

    W&B keeps its first value of a step, so steps that run again after a crash stay as they were.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        wandb = _wandb()
        self._run = wandb.init(
            project=config.log.wandb,
            name=folder.name,
            id=read_about(folder)["id"],
            resume="allow",
            dir=folder,
            config=without_secrets(config.model_dump(mode="json")),
            settings=wandb.Settings(finish_timeout=LONGEST_FINISH_S),
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(int(failed))


class Trackio:
    """A run of trackio, the same one after a resume.

    trackio keeps every value of a step, so a step that runs again after a crash is there twice.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import trackio

        self._trackio = trackio
        name = f"{folder.name}-{read_about(folder)['id']}"
        settings = without_secrets(config.model_dump(mode="json"))
        trackio.init(project=config.log.trackio, name=name, config=settings, resume="allow")

    def write(self, step: int, values: Values) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._trackio.finish()


class Guarded:
    """A tracker whose failure is noted once and does not end the run."""

    def __init__(self, setting: str, open_writer: Callable[[], Writer], note: Note) -> None:
        self._setting, self._note = setting, note
        self._writer: Writer | None = None
        self._writer = self._call(open_writer)

    def write(self, step: int, values: Values) -> None:
        if self._writer is not None:
            self._call(partial(self._writer.write, step, values))

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._call(partial(self._writer.close, failed))

    def _call(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception as error:  # a package may raise anything; metrics.jsonl has every row
            self._writer = None
            self._note(f"WARNING: log.{self._setting}: {error!r}; the run goes on without it")
            return None


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
        wandb.login(verify=False)  # a key is enough; without a network the run goes on, see Guarded
    except wandb.errors.Error as error:
        raise UsageError(
            f"log.wandb: {error}; run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline "
            "to send the run later by `wandb sync`"
        ) from None
