"""`onepolicy eval`: evaluate a model or a checkpoint on held-out problems."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from onepolicy.cli.common import (
    CHECKPOINTS,
    RUN_FILE,
    RUN_ONLY,
    Commands,
    add_command,
    prepare_process,
    refuse_model_path,
    warn_idle,
)
from onepolicy.config import RunConfig, UsageError, read_recipe, resolve
from onepolicy.config.cluster import LocalCluster
from onepolicy.config.idle import idle_settings
from onepolicy.config.input_files import check_model_path, check_task_files
from onepolicy.config.output_paths import CONFIG
from onepolicy.config.stored_config import check_trust, read_stored_config
from onepolicy.console import print_status


def add_eval(commands: Commands) -> None:
    """Add the command `eval`."""
    evaluate = add_command(
        commands,
        "eval",
        "evaluate a model or a checkpoint on held-out problems",
        run_eval,
        examples=(
            "onepolicy eval runs/quickstart eval.k=16",
            "onepolicy eval runs/quickstart --step 30 eval.problems=200",
            "onepolicy eval recipes/quickstart.toml model.path=tiny",
        ),
        settings=RunConfig,
        ignored=RUN_ONLY,
    )
    evaluate.add_argument(
        "recipe",
        help="TOML recipe whose task, sampling and eval settings are used, or a run folder",
    )
    evaluate.add_argument(
        "--step",
        type=int,
        help="with a run folder: the checkpoint of this step (default: the newest)",
    )
    evaluate.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="e.g. eval.k=16 eval.problems=200"
    )


def run_eval(arguments: argparse.Namespace) -> None:
    """Evaluate the model of a recipe, or a checkpoint of a run folder."""
    path = Path(arguments.recipe)
    print_status(f"reading {path}")
    _check_recipe_or_run(path)
    run: Path | None = None
    if path.is_dir():
        run = path
        tree = read_stored_config(path).model_dump()
        refuse_model_path(arguments.overrides, f"eval {path}")
    else:
        tree = read_recipe(path)
    config = resolve({"out": "unused", "steps": 1, **tree}, arguments.overrides)
    if run is not None:
        no_ray = config.model_copy(update={"cluster": LocalCluster()})  # as it is evaluated
        check_trust(no_ray, run, arguments.overrides, f"eval {run}")
    warn_idle(idle_settings(config), arguments.overrides)
    if run is None and arguments.step is not None:
        raise UsageError(
            f"--step: {path} is a recipe, not a run folder; set model.path=... instead"
        )
    loaded = f"a checkpoint of {path}"
    if run is None:
        check_model_path(config.model.path)
        loaded = config.model.path
    check_task_files(config.task, config.eval.problems)
    prepare_process(config.train.threads)
    print_status(f"loading {loaded}")
    from onepolicy.run.eval_command import evaluate_model

    evaluate_model(config, run, arguments.step)


def _check_recipe_or_run(path: Path) -> None:
    """Raise UsageError unless `path` is a run folder or a recipe.

    For a checkpoint or a model, the message gives the right command.
    """
    number = re.fullmatch(r"(?:step_)?0*([0-9]{1,15})", path.name)
    run = next((each for each in path.parents[:2] if (each / CHECKPOINTS).is_dir()), None)
    if number and run:
        raise UsageError(
            f"{path}: eval takes a run folder; for its checkpoint give {run} --step {number[1]}"
        )
    has_config = path.is_dir() and (path / CONFIG).is_file()
    if has_config and not (path / RUN_FILE).is_file() and not (path / CHECKPOINTS).is_dir():
        raise UsageError(f"{path}: a model, not a run; give a recipe and model.path={path}")
    if not (has_config or path.is_file() or path.suffix == ".toml"):
        raise UsageError(
            f"{path}: no such run or checkpoint, and no recipe; give a run folder (it has {CONFIG} "
            f"and {CHECKPOINTS}/), with --step N for one of its checkpoints, or the path of a "
            ".toml recipe"
        )
