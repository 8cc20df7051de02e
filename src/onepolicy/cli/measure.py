"""`onepolicy measure`: a model and an engine in, a verdict out."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from onepolicy.cli.common import RUN_ONLY, command, prepare_process, say, stages
from onepolicy.config import RunConfig, UsageError, read_recipe
from onepolicy.config.measure import engine_settings, measure_settings, prompt_settings
from onepolicy.config.numerics import ON_POLICY, Numerics
from onepolicy.config.place import check_place
from onepolicy.config.present import check_model, check_task

if TYPE_CHECKING:
    from rich.console import Console

    from onepolicy.measure.bitwise import Bitwise


def add(commands: argparse._SubParsersAction[Any]) -> None:
    measure = command(
        commands,
        "measure",
        "how far apart are rollout engine and trainer, and why: a verdict",
        run_measure,
        examples=(
            "onepolicy measure --tiny --out runs/measured",
            "onepolicy measure Qwen/Qwen3-30B-A3B --engine vllm --prompts prompts.txt rollout.sampling.max_tokens=512",
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
    measure.add_argument(
        "--tiny", action="store_true", help="the tiny policy, or a random one if none was made"
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
        help="lines of text, JSONL with a field prompt, a recipe, or a task (chain, a reasoning-gym name)",
    )
    measure.add_argument(
        "--quant",
        metavar="FORMAT",
        help="quantise the engine's weights: int8, fp8, fp8-weight or simulated",
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
        "--engine-model", metavar="FOLDER", help="weights for the engine, if not the trainer's"
    )
    measure.add_argument(
        "--top",
        type=int,
        metavar="N",
        help="compare whole distributions too, from the engine's N likeliest tokens",
    )
    measure.add_argument(
        "--out",
        metavar="FOLDER",
        help="write report.html, measure.json and figures/ (plotly JSON) there",
    )
    measure.add_argument(
        "--png", action="store_true", help="every figure as PNG too (needs Chromium or Chrome)"
    )


def run_measure(arguments: argparse.Namespace) -> int:
    overrides = [
        *(engine_settings(arguments.engine) if arguments.engine else []),
        *arguments.overrides,
    ]
    if arguments.quant:
        overrides = [f"rollout.quant.format={arguments.quant}", *overrides]
    if arguments.numerics:
        overrides = [f"numerics={arguments.numerics}", *overrides]
    model = arguments.model
    if model and "=" in model and not Path(model).exists():
        model, overrides = None, [model, *overrides]  # argparse put the first override there
    if model and arguments.tiny:
        raise UsageError(f"measure: --tiny is a model of its own; leave out {model} or --tiny")
    if model and Path(model).suffix == ".toml":
        raise UsageError(
            f"measure: {model} is a recipe, and a model stands here; give --recipe {model}"
        )
    if not (model or arguments.tiny or arguments.recipe):
        raise UsageError("measure: give a model (folder or hub id), --recipe or --tiny")
    out = Path(arguments.out) if arguments.out else None
    if out is not None:
        _require_new(out)
    if arguments.png and out is None:
        raise UsageError(
            "--png: figures are written into the folder of the report; give --out FOLDER too"
        )
    say(f"reading {arguments.recipe or 'the settings'}")
    tree = read_recipe(arguments.recipe) if arguments.recipe else {}
    if arguments.png and (arguments.numerics or tree.get("numerics")) == ON_POLICY:
        raise UsageError(
            "--png: numerics = on-policy compares bits and draws no figure; leave it out"
        )
    if arguments.prompts:
        tree["task"] = prompt_settings(arguments.prompts)
    if model:
        overrides = [f"model.path={model}", *overrides]
    _, config = measure_settings(tree, overrides, "tiny" if arguments.tiny else None)
    if not arguments.tiny:  # or else a random one is made
        check_model(config.model.path)
    check_task(config.task)
    prepare_process(config.train.threads)
    from rich.console import Console

    from onepolicy.measure import measure, result
    from onepolicy.measure.bitwise import Bitwise
    from onepolicy.report.measure import summary, write_report

    console = Console()
    with stages("measure") as tell:
        tell(f"loading {'the tiny policy' if arguments.tiny else config.model.path}")
        found = measure.measure_model(
            tree,
            overrides,
            tiny=arguments.tiny,
            engine_model=arguments.engine_model,
            dense=arguments.dense,
            top=arguments.top,
            say=tell,
        )
    if isinstance(found, Bitwise):
        return _show_bitwise(found, out, console)
    written = None
    if out is not None:
        result.write(found, out)
        written = write_report(out, png=arguments.png)
    for part in summary(result.to_tree(found)):
        console.print(part, highlight=False)
    if written is not None:
        console.print(f"written: {written}", soft_wrap=True, highlight=False)
    return 0


def _show_bitwise(found: Bitwise, out: Path | None, console: Console) -> int:
    """Exit status 1 if any bit differs, or could."""
    from onepolicy.measure.bitwise import write
    from onepolicy.report.bitwise import summary

    written = None if out is None else write(found, out)
    for part in summary(dataclasses.asdict(found) | {"holds": found.holds}):
        console.print(part, highlight=False)
    if written is not None:
        console.print(
            f"written: {written} (bits have no charts, so there is no report.html)", soft_wrap=True
        )
    return 0 if found.holds else 1


def _require_new(out: Path) -> None:
    """UsageError, before anything is measured, if the folder exists or cannot be made."""
    check_place("--out", out)
    if os.path.lexists(out):
        raise UsageError(f"--out: {out} already exists; choose another folder")
    try:
        out.mkdir(parents=True)
        out.rmdir()
    except OSError as error:
        raise UsageError(
            f"--out: {out} cannot be made ({error.strerror}); choose another folder"
        ) from None
