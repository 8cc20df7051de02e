"""The effective settings that a run folder holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from onepolicy.bounded import refuse_holes
from onepolicy.config.address import is_loopback
from onepolicy.config.cluster import RayCluster
from onepolicy.config.engine import ServerEngineConfig
from onepolicy.config.errors import describe_errors
from onepolicy.config.output_paths import CONFIG
from onepolicy.config.run import RunConfig
from onepolicy.config.secrets import show_value
from onepolicy.config.task import GymnasiumTask, ProgramTask, TaskConfig, VerifiersTask
from onepolicy.errors import UsageError

TRUST, URL = "model.trust_remote_code", "rollout.engine.url"
ADDRESS = "cluster.address"
KIND, ID = "task.kind", "task.id"
TYPED_AGAIN = (TRUST, URL, ADDRESS, KIND, ID)
"""Settings that a stored run cannot make alone (`check_trust`)."""


def read_stored_config(run: Path) -> RunConfig:
    """Return the settings of a run folder.

    Raises UsageError if there is no config.json, or if it is damaged.
    """
    path = run / CONFIG
    if not path.is_file():
        raise UsageError(f"{run}: not a run folder (no {CONFIG}); give the folder of a run")
    refuse_holes(path, "copy it from a run of the same kind")
    data = path.read_bytes()
    try:
        json.loads(data)  # pydantic's own error would quote the whole file
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is damaged and no JSON; copy the run folder again") from None
    try:
        return RunConfig.model_validate_json(data)
    except ValidationError as error:
        problem = describe_errors(error)
        raise UsageError(f"{path}: not the settings of a run: {problem}") from None


def check_trust(config: RunConfig, run: Path, overrides: Sequence[str], command: str) -> None:
    """Raise UsageError if only a run folder names code to run, or an address to trust.

    config: the run's settings with these overrides. command: that would obey, for the error.
    """
    typed = {override.partition("=")[0] for override in overrides}
    for setting, value, danger, way_out in _dangers(config):
        sections = {setting.rsplit(".", dots)[0] for dots in range(setting.count(".") + 1)}
        if not typed & sections:
            raise UsageError(
                f"{run}: its {CONFIG} has {setting} = {value}, so `onepolicy {command}` would "
                f"{danger}, then add {setting}={value} to the command, or {way_out}"
            )


def settings_to_repeat(config: RunConfig) -> list[str]:
    """Return the overrides without which `check_trust` refuses this run's folder."""
    return [f"{setting}={value}" for setting, value, _, _ in _dangers(config)]


def resume_command(run: Path) -> str:
    """Return the command that resumes a run, with `settings_to_repeat`. Raises nothing."""
    words = ["onepolicy", "train", "--resume", str(run)]
    with suppress(UsageError, OSError):  # damaged settings, which a resume will report
        words += settings_to_repeat(read_stored_config(run))
    return f"`{shlex.join(words)}`"


def _dangers(config: RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield (setting, value as typed, danger, way out) of settings that must be typed again."""
    if config.model.trust_remote_code:
        yield (
            *(TRUST, "true"),
            "run Python code that the model brings along; read that code first",
            f"{TRUST}=false to load the model without it",
        )
    engine, cluster = config.rollout.engine, config.cluster
    # Without a token no server of another machine is used.
    if isinstance(engine, ServerEngineConfig) and engine.token_env and not _is_here(engine.url):
        yield (
            *(URL, json.dumps(engine.url, ensure_ascii=False)),
            f"send it prompts, weights and the token in ${engine.token_env}; check whose server "
            "that is first",
            "another address",
        )
    address = "auto"
    if isinstance(cluster, RayCluster):
        address = cluster.address or "auto"
    if address != "auto" and not _is_here(f"http://{address}"):
        yield (
            *(ADDRESS, json.dumps(address)),
            "join that Ray, show it Ray's token and exchange pickles with it; check whose cluster "
            "that is first",
            "another address",
        )
    yield from _imports(config.task)


def _imports(task: TaskConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yield as `_dangers` what imports a module or starts a program by its name."""
    if isinstance(task, VerifiersTask):
        yield (
            *(KIND, task.kind),
            "import the packages that its task.env names; read which these are first",
            "another task",
        )
    if isinstance(task, ProgramTask):
        yield (
            *(KIND, task.kind),
            f"run the program {show_value(('command',), list(task.command))} and show it the files "
            "that task.folder and task.readable name; read all of them first",
            "another task",
        )
    # MODULE:NAME. gymnasium's wrappers of older versions take such an id as a parameter.
    if isinstance(task, GymnasiumTask) and ":" in "".join(_texts([task.id, task.params])):
        yield (
            *(ID, json.dumps(task.id, ensure_ascii=False)),
            "import a module that its task.id or task.params names; read which that is first",
            "another environment",
        )


def _texts(tree: Any) -> Iterator[str]:
    """Yield the texts in a tree that are no names."""
    children = tree
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        children = list(tree.values())
    if isinstance(children, list):
        for child in children:
            yield from _texts(child)


def _is_here(url: str | tuple[str, ...]) -> bool:
    """Return whether all addresses are of this machine. A file or a DNS name may lead elsewhere."""
    if isinstance(url, tuple):
        return all(map(_is_here, url))
    return url.startswith(("http://", "https://")) and is_loopback(urlsplit(url).hostname or "")
