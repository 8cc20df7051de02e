"""The runs that `onepolicy compare` is asked for, checked before any of them starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.engine import HFEngineConfig, ServerEngineConfig
from onepolicy.config.input_files import check_input_files
from onepolicy.config.model import usable_cores
from onepolicy.config.output_paths import CONFIG, check_new_run_folder
from onepolicy.config.stored_config import read_stored_config, settings_to_repeat
from onepolicy.files import refuse_links_out
from onepolicy.launch.arms import Arm

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Exist where a GPU of NVIDIA or AMD may be used. Asking torch would take seconds."""


@dataclass(frozen=True)
class PlannedArm:
    """An arm with one seed: its settings beside the recipe, and all of them."""

    name: str
    settings: tuple[str, ...]
    config: RunConfig


def plan_arms(
    recipe: str,
    overrides: Sequence[str],
    named: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
) -> list[PlannedArm]:
    """Return every arm with every seed, the seeds one after the other.

    overrides: settings of all arms. named: those of each. seeds: None for the recipe's own. Raises
    UsageError for settings that are wrong, or that contradict each other or another option.
    """
    config = load(recipe, list(overrides))
    _refuse_names(overrides, named, seeds)
    seeds = seeds or [config.seed]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds: {' '.join(map(str, seeds))}; name each seed once")
    _check_arms(recipe, overrides, named)
    return [
        PlannedArm(name, words, load(recipe, words))
        for seed in seeds
        for name, settings in named.items()
        for words in [(*overrides, *settings, f"seed={seed}")]
    ]


def _refuse_names(
    overrides: Sequence[str], named: Mapping[str, Sequence[str]], seeds: Sequence[int] | None
) -> None:
    """Refuse `out` and `seed` where the command gives every run its own."""
    for override in [*overrides, *(each for settings in named.values() for each in settings)]:
        if override.startswith("out="):
            raise UsageError(f"{override}: every run has a folder of its own; give --out FOLDER")
    for name, settings in named.items():
        for override in settings:
            if override.startswith("seed="):
                raise UsageError(f"arm {name}: {override}; arms have the same seeds, give --seeds")
    for override in overrides:
        if override.startswith("seed=") and seeds:
            raise UsageError(f"{override}: contradicts --seeds; leave one of them out")


def _check_arms(recipe: str, overrides: Sequence[str], named: Mapping[str, Sequence[str]]) -> None:
    """Check every arm with the recipe's seed, and that arms and overrides change something."""
    configs: dict[str, RunConfig] = {}
    for name, settings in named.items():
        try:
            config = load(recipe, [*overrides, *settings])
            check_input_files(config)
        except UsageError as error:
            raise UsageError(f"arm {name}: {error}") from None
        same = next((other for other, known in configs.items() if known == config), None)
        if same is not None:
            raise UsageError(
                f"--arm: {same} and {name} have the same settings; change one, or leave it out"
            )
        configs[name] = config
    for at, override in enumerate(overrides):
        rest = [*overrides[:at], *overrides[at + 1 :]]
        changes_recipe = _loaded(recipe, rest) != _loaded(recipe, overrides)
        changes_arm = any(
            _loaded(recipe, [*rest, *settings]) != configs[name] for name, settings in named.items()
        )
        if changes_recipe and not changes_arm:
            raise UsageError(
                f"{override}: has no effect, because every arm sets this itself; put it behind "
                "--arm NAME"
            )


def _loaded(recipe: str, settings: Sequence[str]) -> RunConfig | None:
    """Return the settings, None if they are wrong."""
    try:
        return load(recipe, list(settings))
    except UsageError:
        return None


def runs_in(out: Path, arms: Sequence[PlannedArm]) -> list[Arm]:
    """Return the runs with their folders.

    Raises UsageError if a folder cannot be made, or holds something else.
    """
    runs = []
    for arm in arms:
        folder = out / f"{arm.name}-seed{arm.config.seed}"
        if (folder / CONFIG).exists():
            _check_begun(folder, arm)
        else:
            check_new_run_folder(folder)
        repeated = tuple(settings_to_repeat(arm.config))
        runs.append(
            Arm(arm.name, arm.config.seed, arm.settings, arm.config.steps, folder, repeated)
        )
    return runs


def _check_begun(folder: Path, arm: PlannedArm) -> None:
    refuse_links_out(folder, "the run's")
    begun = without_settled(read_stored_config(folder), arm.config)
    if begun.model_copy(update={"out": arm.config.out}) == arm.config:
        return
    differing = [
        name
        for name in type(begun).model_fields
        if name != "out" and getattr(begun, name) != getattr(arm.config, name)
    ]
    raise UsageError(
        f"{folder}: holds a run with other settings than arm {arm.name} now has "
        f"({', '.join(differing)}); give another --out, or remove the folder"
    )


def without_settled(begun: RunConfig, planned: RunConfig) -> RunConfig:
    """Return a run's settings as planned where a run on a GPU settles what nobody set.

    These are the precision and the embedded engine's max_len (build/gpu_defaults.py).
    """
    sections: dict[str, Any] = {}
    if not planned.names_precision:
        dtypes = {"fsdp_param_dtype": planned.train.fsdp_param_dtype}
        sections["train"] = begun.train.model_copy(update=dtypes)
        sections["model"] = begun.model.model_copy(update={"dtype": planned.model.dtype})
    engine, theirs = planned.rollout.engine, begun.rollout.engine
    embedded = isinstance(engine, HFEngineConfig) and isinstance(theirs, HFEngineConfig)
    if embedded and engine.max_len is None:
        theirs = theirs.model_copy(update={"max_len": None})
        sections["rollout"] = begun.rollout.model_copy(update={"engine": theirs})
    return begun.model_copy(update=sections)


def plan_jobs(configs: Sequence[RunConfig], given: int | None) -> int:
    """Return how many runs are trained at a time. given: --jobs.

    Raises UsageError if it is none, or if the runs would share a server, whose weights are those
    of one run.
    """
    if given is not None and given < 1:
        raise UsageError(f"--jobs: {given}; give 1 or more")
    urls = {url for url in (_server(config) for config in configs) if url is not None}
    if urls:
        if given is not None and given > 1:
            raise UsageError(
                f"--jobs: {given}, but the runs sample from {', '.join(sorted(urls))}, which holds "
                "the weights of one run at a time; give --jobs 1"
            )
        return 1
    if given is not None:
        return given
    return max(1, min(usable_cores() // _cores_of(config) for config in configs))


def _server(config: RunConfig) -> str | None:
    """Return the addresses of the servers that a run samples from, None if it starts its own."""
    engine = config.rollout.engine
    if config.cluster.kind == "ray" or not isinstance(engine, ServerEngineConfig):
        return None
    if isinstance(engine.url, str):
        return engine.url
    return ", ".join(engine.url)


def _cores_of(config: RunConfig) -> int:
    """Return how many cores a run takes: all of them if it also takes a GPU, or sizes vLLM's."""
    train = config.train
    may_use_gpu = train.device != "cpu" and any(map(os.path.exists, GPU_FILES))
    if may_use_gpu or train.threads is None or config.rollout.engine.kind != "hf":
        return usable_cores()
    return train.threads * max(1, train.ranks)
