"""`onepolicy measure`: the gap between a rollout engine and the trainer, and a verdict."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, get_args

from onepolicy.cli.common import (
    RUN_ONLY,
    Commands,
    add_command,
    prepare_process,
    warn_idle,
)
from onepolicy.cli.parser import Parser
from onepolicy.config import RunConfig, UsageError, read_recipe
from onepolicy.config.idle import idle_settings
from onepolicy.config.input_files import check_model_path, check_task_files
from onepolicy.config.measure import engine_overrides, measure_settings, task_settings
from onepolicy.config.numerics import ON_POLICY, Numerics
from onepolicy.config.output_paths import check_output_path
from onepolicy.console import print_status


def add_measure(commands: Commands) -> None:
    """Add the command `measure`."""
    measure = add_command(
        commands,
        "measure",
        "how far apart are rollout engine and trainer, and why: a verdict",
        run_measure,
        examples=(
            "onepolicy measure --tiny --out runs/measured",
            "onepolicy measure Qwen/Qwen3-30B-A3B --engine vllm --prompts prompts.txt "
            "rollout.sampling.max_tokens=512",
            "onepolicy measure --recipe recipes/on_policy.toml --numerics on-policy",
        ),
        settings=RunConfig,
        ignored=(*RUN_ONLY, "model.path"),
    )
    measure.add_argument(
        "model", nargs="?", help="folder or hub id (default: the recipe's; not with --tiny)"
    )
    measure.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="e.g. rollout.sampling.max_tokens=512"
    )
    _add_inputs(measure)
    _add_comparisons(measure)
    measure.add_argument(
        "--out",
        metavar="FOLDER",
        help="write report.html, measure.json and figures/ (plotly JSON) there",
    )
    measure.add_argument(
        "--png", action="store_true", help="every figure as PNG too (needs Chromium or Chrome)"
    )


def _add_inputs(measure: Parser) -> None:
    """Add the options that give model, engine and prompts."""
    measure.add_argument(
        "--tiny",
        action="store_true",
        help="a first look: at the tiny policy, or at a random one if none was made",
    )
    measure.add_argument(
        "--recipe", help="TOML recipe whose task, sampling, engine and train settings are used"
    )
    measure.add_argument(
        "--engine",
        metavar="KIND[:URL]",
        help="hf (default), vllm, or a server's kind and address, as in sglang:URL",
    )
    measure.add_argument(
        "--prompts",
        metavar="FILE|TASK",
        help="lines of text, JSONL with a field prompt, a recipe, or a task (chain, a "
        "reasoning-gym name)",
    )
    measure.add_argument(
        "--engine-model", metavar="FOLDER", help="weights for the engine, if not the trainer's"
    )


def _add_comparisons(measure: Parser) -> None:
    """Add the options that change numerics or compare more."""
    measure.add_argument(
        "--quant",
        metavar="FORMAT",
        help="quantise the engine's weights: int8, fp8, fp8-weight or simulated",
    )
    measure.add_argument(
        "--pressure",
        metavar="SCALE",
        help="noise on the embedded engine's routers, to calibrate a study (rollout.pressure)",
    )
    measure.add_argument(
        "--numerics",
        choices=get_args(Numerics),
        help="on-policy: how many log-probabilities differ in any bit, where first",
    )
    measure.add_argument(
        "--dense",
        metavar="MODEL",
        help="a dense model to show beside it; `tiny` makes a random one",
    )
    measure.add_argument(
        "--top",
        type=int,
        metavar="N",
        help="compare whole distributions too, from the engine's N likeliest tokens",
    )


def run_measure(arguments: argparse.Namespace) -> int:
    """Measure, print the verdict and return the exit status."""
    model, overrides = _model_and_overrides(arguments)
    out: Path | None = None
    if arguments.out:
        out = Path(arguments.out)
        check_output_path("--out", out)
        if os.path.lexists(out):
            raise UsageError(f"--out: {out} already exists; choose another folder")
    if arguments.png and out is None:
        raise UsageError(
            "--png: figures are written into the folder of the report; give --out FOLDER too"
        )
    print_status(f"reading {arguments.recipe or 'the settings'}")
    tree = _recipe_settings(arguments)
    loaded: str | None = None
    if arguments.tiny:
        loaded = "tiny"
    if model:
        overrides = [f"model.path={model}", *overrides]
    _, config = measure_settings(tree, overrides, loaded)
    warn_idle(idle_settings(config), overrides)
    if not arguments.tiny:  # a missing tiny policy is replaced by a random one
        check_model_path(config.model.path)
    check_task_files(config.task)
    prepare_process(config.train.threads)
    if arguments.tiny:
        loaded = "the tiny policy"
    from onepolicy.measure.command import measure_and_show

    return measure_and_show(
        tree,
        overrides,
        loaded=loaded or config.model.path,
        out=out,
        png=arguments.png,
        short=is_first_look(arguments),
        tiny=arguments.tiny,
        engine_model=arguments.engine_model,
        dense=arguments.dense,
        top=arguments.top,
    )


def is_first_look(arguments: argparse.Namespace) -> bool:
    """Return whether it is `measure --tiny` with nothing that asks for a number of its own."""
    more = "model overrides recipe engine prompts engine_model quant pressure numerics dense top"
    return arguments.tiny and not any(getattr(arguments, name) for name in more.split())


def _model_and_overrides(arguments: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the model and the settings of the command.

    argparse takes the first setting for the model if no model is given.
    """
    overrides = list(arguments.overrides)
    if arguments.engine:
        overrides = [*engine_overrides(arguments.engine), *overrides]
    if arguments.quant:
        overrides = [f"rollout.quant.format={arguments.quant}", *overrides]
    if arguments.pressure:
        scale = f"rollout.pressure.scale={arguments.pressure}"
        # last, because a replay.mode drops it: the guard would refuse the routes of pressure
        overrides = [scale, *overrides, "replay.min_agreement=0"]
    if arguments.numerics:
        overrides = [f"numerics={arguments.numerics}", *overrides]
    model = arguments.model
    if model and "=" in model and not Path(model).exists():
        model, overrides = None, [model, *overrides]
    if model and arguments.tiny:
        raise UsageError(f"measure: --tiny is a model too; leave out {model} or --tiny")
    if model and Path(model).suffix == ".toml":
        raise UsageError(
            f"measure: {model} is a recipe, but a model is expected; give --recipe {model}"
        )
    if not (model or arguments.tiny or arguments.recipe):
        raise UsageError("measure: give a model (folder or hub id), --recipe or --tiny")
    return model, overrides


def _recipe_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if arguments.recipe:
        tree = read_recipe(arguments.recipe)
    if arguments.png and (arguments.numerics or tree.get("numerics")) == ON_POLICY:
        raise UsageError(
            "--png: numerics = on-policy compares bits and draws no figure; leave it out"
        )
    if arguments.prompts:
        tree["task"] = task_settings(arguments.prompts)
    return tree
