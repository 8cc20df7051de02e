"""`onepolicy train`: start, resume, fork and restart training runs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from onepolicy.cli.common import (
    CHECKPOINTS,
    Commands,
    add_command,
    check_train_extra,
    prepare_process,
    refuse_model_path,
    warn_idle,
)
from onepolicy.cli.process import INTERRUPTED, print_stopped_report
from onepolicy.config import RunConfig, UsageError, load, resolve
from onepolicy.config.idle import idle_settings
from onepolicy.config.input_files import check_input_files, check_run_task
from onepolicy.config.load import parse_value
from onepolicy.config.output_paths import (
    CONFIG,
    check_new_run_folder,
    check_resumable,
    claim_run_folder,
)
from onepolicy.config.rules import value_at
from onepolicy.config.stored_config import (
    TRUST,
    TYPED_AGAIN,
    check_trust,
    read_stored_config,
    settings_to_repeat,
)
from onepolicy.console import print_status, print_text
from onepolicy.launch.agent import end_with_agent, needs_agent, run_on_ranks
from onepolicy.launch.restarts import supervise

RESUME_SETTINGS = (
    TRUST,
    "optim.state",
    "rollout.engine.url",
    "rollout.engine.token_env",
    "train.rank_timeout",
)
"""Settings that a resumed run may change, besides cluster.* and RESUME_COUNTS."""
RESUME_COUNTS = {"steps": 1, "train.ranks": 0}
"""Counts that a resumed run may change, with their least values."""

FOLLOWING = ("correction", "rollout.engine.dtype", "rollout.engine.lm_head")
"""Settings whose defaults follow from others."""


def add_train(commands: Commands) -> None:
    """Add the command `train`."""
    train = add_command(
        commands,
        "train",
        "train a policy; resume or fork a run",
        run_train,
        examples=(
            "onepolicy train recipes/quickstart.toml",
            "onepolicy train recipes/quickstart.toml replay.mode=off optim.lr=5e-5 "
            "out=runs/no-replay",
            "onepolicy train --resume runs/quickstart steps=90",
            "onepolicy train --from runs/quickstart/30 out=runs/fork optim.lr=5e-5 steps=90",
        ),
        settings=RunConfig,
    )
    train.add_argument(
        "recipe",
        nargs="?",
        help="TOML recipe, e.g. recipes/quickstart.toml (not with --resume or --from)",
    )
    origin = train.add_mutually_exclusive_group()
    origin.add_argument(
        "--resume",
        metavar="RUN",
        help="continue this run folder after its newest checkpoint (steps=N trains on)",
    )
    origin.add_argument(
        "--from",
        dest="fork",
        metavar="RUN/STEP",
        help="new run from a checkpoint of another, with changed settings",
    )
    train.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="resume the run when it dies, at most N times",
    )
    train.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="settings on top of the recipe"
    )


def run_train(arguments: argparse.Namespace) -> int:
    """Start, resume or fork a run and return the exit status."""
    arguments.on_rank = end_with_agent()  # the agent has said what it reads
    if _torchrun_rank() > 0 and "WORLD_SIZE" in os.environ:  # rank 0 runs the command
        prepare_process(None)
        from onepolicy.launch.ranks import run_launched_rank

        return run_launched_rank()
    overrides = list(arguments.overrides)
    if arguments.resume or arguments.fork:
        if arguments.recipe:  # argparse took the first override for the recipe
            overrides.insert(0, arguments.recipe)
    elif not arguments.recipe:
        raise UsageError(
            "train: give a recipe (e.g. recipes/quickstart.toml), --resume RUN or --from RUN/STEP"
        )
    if arguments.restarts:
        return _supervise(arguments, overrides)
    if arguments.resume:
        return _resume(arguments, overrides)
    if arguments.fork:
        return _fork(arguments, overrides)
    return _start(arguments, overrides)


def _print_reading(arguments: argparse.Namespace, path: str | Path) -> None:
    if not arguments.on_rank:
        print_status(f"reading {path}")


def _torchrun_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            value = os.environ[name]
            raise UsageError(
                f"{name}: {value!r} in the environment is no number; torchrun sets it, or unset it"
            )
    return int(os.environ.get("RANK", "0"))


def _start(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _print_reading(arguments, arguments.recipe)
    config = load(arguments.recipe, overrides)
    if not needs_agent(config):
        warn_idle(idle_settings(config))
    with _free_run_folder(config, overrides) as config:
        check_input_files(config)
        arguments.folder = Path(config.out)
        if needs_agent(config):
            command = _start_command(arguments, overrides, arguments.folder)
            return _run_on_ranks(arguments, command, config)
        print_text(f"run folder: {config.out}")
        return _run_here(config, config.train.threads, config.model.path)


def _run_here(
    config: RunConfig,
    threads: int | None,
    loaded: str,
    *,
    fork: Path | None = None,
    resumed: Path | None = None,
    **counts: int | None,
) -> int:
    """Load torch, train to the end and print the summary. Arguments: of `run_to_end`."""
    prepare_process(threads)
    print_status(f"loading {loaded}")
    from onepolicy.run.train_command import run_to_end

    run_to_end(config, fork=fork, resumed=resumed, **counts)
    return 0


def _run_on_ranks(
    arguments: argparse.Namespace, command: list[str], config: RunConfig, count: int | None = None
) -> int:
    check_train_extra()
    arguments.had_ranks = True  # a report after SIGTERM is this process's to write
    status = run_on_ranks(command, config, count)
    if status == INTERRUPTED:
        print_stopped_report(arguments.folder)
    return status


@contextmanager
def _free_run_folder(config: RunConfig, overrides: list[str]) -> Iterator[RunConfig]:
    """Yield the settings with a run folder that no other run uses.

    If a run uses the recipe's `out` or is about to, a number is added to it. Raises UsageError if
    an `out` in the command is not free.
    """
    if _out_override(overrides) is not None:
        check_new_run_folder(Path(config.out))
        yield config
        return
    with claim_run_folder(Path(config.out)) as out:
        if out != Path(config.out):
            config = config.model_copy(update={"out": str(out)})
        yield config


def _out_override(overrides: list[str]) -> Path | None:
    """Return the run folder that the command gives as out=..."""
    values = [each.removeprefix("out=") for each in overrides if each.startswith("out=")]
    if not values:
        return None
    return Path(str(parse_value(values[-1])))


def _supervise(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run the command in a child process, and resume the run whenever that process dies."""
    restarts = arguments.restarts
    if restarts < 0:
        raise UsageError(f"--restarts: {restarts}; give 0 or more")
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            f"--restarts: {restarts}; torchrun starts its processes again itself (--max-restarts)"
        )
    if arguments.resume:
        out = Path(arguments.resume)
        check_resumable(out)
        command = ["train", "--resume", arguments.resume, *overrides]
        return supervise(out, command, command, restarts, print_status)
    if arguments.fork:
        out = _fork_out(overrides)
        command = ["train", "--from", arguments.fork, *overrides]
        typed = [each for each in overrides if each.partition("=")[0] in TYPED_AGAIN]
        resume = ["train", "--resume", str(out), *typed]
        return supervise(out, command, resume, restarts, print_status)
    config = load(arguments.recipe, overrides)
    with _free_run_folder(config, overrides) as config:
        out = Path(config.out)
        command = _start_command(arguments, overrides, out)
        resume = ["train", "--resume", str(out), *settings_to_repeat(config)]
        return supervise(out, command, resume, restarts, print_status)


def _start_command(arguments: argparse.Namespace, overrides: list[str], out: Path) -> list[str]:
    """Return the command that starts the run in folder `out`."""
    command = ["train", arguments.recipe, *overrides]
    if _out_override(overrides) is None:  # without it, every start would choose a new folder
        command.append(f"out={json.dumps(str(out), ensure_ascii=False)}")
    return command


def _resume(arguments: argparse.Namespace, overrides: list[str]) -> int:
    path = Path(arguments.resume)
    counts, settings = _resume_changes(overrides, path)
    _print_reading(arguments, path)
    check_resumable(path)
    config = read_stored_config(path)
    arguments.folder = path
    if settings:
        stored, config = config, resolve(config.model_dump(), settings)
        if config.task != stored.task:
            raise UsageError("task.id: a resumed run keeps its task; leave it out")
    check_trust(config, path, overrides, f"train --resume {path}")
    check_run_task(config)
    steps, ranks = counts.get("steps"), counts.get("train.ranks")
    if needs_agent(config, ranks):
        command = ["train", "--resume", arguments.resume, *overrides]
        return _run_on_ranks(arguments, command, config, ranks)
    loaded = f"the newest checkpoint of {path}"
    return _run_here(config, config.train.threads, loaded, resumed=path, steps=steps, ranks=ranks)


def _resume_changes(overrides: list[str], path: Path) -> tuple[dict[str, int], list[str]]:
    """Return the counts and the other settings that a resume changes.

    Raises UsageError for a setting that a resume may not change.
    """
    counts: dict[str, int] = {}
    settings: list[str] = []
    for override in overrides:
        name, _, value = override.partition("=")
        if name.startswith("cluster.") or name in RESUME_SETTINGS + TYPED_AGAIN:
            settings.append(override)
            continue
        is_count = name in RESUME_COUNTS and value.isascii() and value.isdigit()
        if not is_count or int(value) < RESUME_COUNTS[name]:
            allowed = ", ".join([f"{count}=N" for count in RESUME_COUNTS] + list(RESUME_SETTINGS))
            raise UsageError(
                f"--resume: only {allowed} and cluster.* may change, not {override!r}; "
                f"change settings with --from {path}"
            )
        counts[name] = int(value)
    return counts, settings


def _fork(arguments: argparse.Namespace, overrides: list[str]) -> int:
    source = Path(arguments.fork)
    arguments.folder = _fork_out(overrides)
    refuse_model_path(overrides, f"--from {source}")
    _print_reading(arguments, source)
    parent = _run_folder_of(source)
    config = _forked_config(read_stored_config(parent), overrides)
    check_trust(config, parent, overrides, f"train --from {source}")
    if not needs_agent(config):
        warn_idle(idle_settings(config))
    check_run_task(config)
    if needs_agent(config):
        command = ["train", "--from", arguments.fork, *overrides]
        return _run_on_ranks(arguments, command, config)
    return _run_here(config, None, f"a checkpoint of {source}", fork=source)


def _fork_out(overrides: list[str]) -> Path:
    """Return the folder of the new run. Raises UsageError if none is given or it is not free."""
    out = _out_override(overrides)
    if out is None:
        raise UsageError("--from: give the new run a folder with out=...")
    check_new_run_folder(out)
    return out


def _run_folder_of(source: Path) -> Path:
    """Return the run folder of RUN, RUN/STEP or RUN/checkpoints/step_NNNNN."""
    for run in (source, source.parent, source.resolve().parent.parent):
        if (run / CHECKPOINTS).is_dir() and (run / CONFIG).is_file():
            return run
    raise UsageError(
        f"{source}: no such checkpoint; give a run folder (it has {CONFIG} and "
        f"{CHECKPOINTS}/) or RUN/STEP"
    )


def _forked_config(parent: RunConfig, overrides: list[str]) -> RunConfig:
    """Return the parent's settings with overrides.

    What followed from the parent's other settings follows from the fork's: the correction from its
    replay.mode, and with numerics = on-policy the engine's dtype and lm_head from the model's.
    """
    tree = parent.model_dump()
    for path in FOLLOWING:
        if any(each.startswith(f"{path}.") for each in overrides):
            continue  # the fork changes a part of it, and the parent's other parts stay
        *sections, name = path.split(".")
        without = deepcopy(tree)
        section = without
        for key in sections:
            section = section[key]
        if name not in section:  # of another kind of engine
            continue
        del section[name]
        if value_at(resolve(without), path) == value_at(parent, path):
            tree = without
    return resolve(tree, overrides)
