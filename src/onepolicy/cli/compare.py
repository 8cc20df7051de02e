"""`onepolicy compare`: one recipe in several arms, side by side, and what differs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from onepolicy.cli.common import Commands, add_command, print_status
from onepolicy.cli.train_extra import check_train_extra
from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.input_files import check_input_files
from onepolicy.config.output_paths import check_output_path
from onepolicy.launch.arms import Arm, check_arms, play_arms

DEFAULT_ARMS = (
    ("off", "replay.mode=off", "correction.preset=recompute"),
    ("r3", "replay.mode=r3", "correction.preset=recompute"),
)


def add_compare(commands: Commands) -> None:
    """Add the command `compare`."""
    compare = add_command(
        commands,
        "compare",
        "train one recipe in several arms, without and with replay unless told otherwise",
        run_compare,
        examples=(
            "onepolicy compare recipes/routing_gap.toml",
            "onepolicy compare recipes/routing_gap.toml steps=400 --seeds 0 1 2",
            "onepolicy compare recipes/quickstart.toml --arm tis correction.preset=tis "
            "--arm icepop correction.preset=icepop",
        ),
        settings=RunConfig,
        ignored=("out",),
    )
    compare.add_argument("recipe", help="TOML recipe, e.g. recipes/routing_gap.toml")
    compare.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings of every arm")
    compare.add_argument(
        "--arm",
        nargs="+",
        action="append",
        metavar=("NAME", "a.b=value"),
        help="an arm and its settings; the first is what the others are compared with "
        "(default: --arm off replay.mode=off correction.preset=recompute --arm r3 "
        "replay.mode=r3 correction.preset=recompute)",
    )
    compare.add_argument(
        "--seeds", nargs="+", type=int, metavar="N", help="default: the recipe's seed"
    )
    compare.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time (default: a core for each)"
    )
    compare.add_argument(
        "--out",
        metavar="FOLDER",
        help="its runs and comparison.html (default: runs/compare-RECIPE)",
    )
    compare.add_argument(
        "--png", action="store_true", help="the picture as PNG too (needs Chromium or Chrome)"
    )


def run_compare(arguments: argparse.Namespace) -> int:
    """Train the arms that are not finished, then print and draw the comparison."""
    out = Path(arguments.out or f"runs/compare-{Path(arguments.recipe).stem}")
    check_output_path("--out", out)
    config = load(arguments.recipe, arguments.overrides)
    arms = _arms(arguments, config, out)
    jobs = _jobs(arguments, config)
    check_arms(arguments.recipe, arms)
    check_input_files(config, evaluates=config.eval.every > 0)
    check_train_extra()
    print_status(f"{len(arms)} runs of {config.steps} steps, {jobs} at a time, in {out}")
    _play(arguments.recipe, arms, config.steps, jobs)
    _show(arguments, arms, out)
    return 0


def _arms(arguments: argparse.Namespace, config: RunConfig, out: Path) -> list[Arm]:
    """Return every arm with every seed, the seeds one after the other."""
    named = [tuple(words) for words in arguments.arm or DEFAULT_ARMS]
    names = [name for name, *_ in named]
    for name in names:
        if "=" in name or "/" in name or name.startswith("."):
            raise UsageError(f"--arm: {name!r} is no name; write --arm NAME a.b=value")
    if len(set(names)) < len(names) or len(names) < 2:
        raise UsageError(
            f"--arm: {', '.join(names)}; give two arms or more, each with a name of its own"
        )
    seeds = arguments.seeds or [config.seed]
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds: {seeds}; name each seed once")
    return [
        Arm(
            name,
            seed,
            (*arguments.overrides, *settings, f"seed={seed}"),
            out / f"{name}-seed{seed}",
        )
        for seed in seeds
        for name, *settings in named
    ]


def _jobs(arguments: argparse.Namespace, config: RunConfig) -> int:
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UsageError(f"--jobs: {arguments.jobs}; give 1 or more")
    cores = os.cpu_count() or 1
    return int(arguments.jobs or max(1, cores // (config.train.threads or cores)))


def _play(recipe: str, arms: Sequence[Arm], steps: int, jobs: int) -> None:
    """Train what is not finished, with a progress bar for every arm."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks = {
            arm: bars.add_task(
                f"{arm.name}, seed {arm.seed}", total=steps, completed=arm.steps_done, start=False
            )
            for arm in arms
        }

        def watch(arm: Arm, ended: bool) -> None:
            bars.start_task(tasks[arm])
            bars.update(tasks[arm], completed=arm.steps_done)
            if ended and not console.is_terminal:
                print_status(f"{arm.name}, seed {arm.seed}: {arm.steps_done} steps")

        play_arms(recipe, arms, jobs, watch)


def _show(arguments: argparse.Namespace, arms: Sequence[Arm], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from onepolicy.report.comparison import (
        CAPTION,
        HEADER,
        ArmRun,
        caution,
        rows_of_table,
        sentences_of,
        write_comparison,
    )
    from onepolicy.report.words import powers

    runs = [ArmRun.read(arm.name, arm.seed, arm.folder) for arm in arms]
    title = f"{Path(arguments.recipe).stem}: {', '.join(dict.fromkeys(arm.name for arm in arms))}"
    found = write_comparison(out, title, runs, png=arguments.png)
    console = Console()
    table = Table(*HEADER, caption=CAPTION)
    for row in rows_of_table(runs):
        table.add_row(*row)
    console.print(table)
    for text in sentences_of(found):
        console.print(powers(text), highlight=False, soft_wrap=True, markup=False)
    console.print(caution(runs), highlight=False, soft_wrap=True)
    print(f"picture: {out / 'comparison.html'}")
