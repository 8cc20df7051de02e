"""`onepolicy compare`: one recipe in several arms, side by side, and what differs."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from onepolicy.cli.common import Commands, add_command, check_train_extra
from onepolicy.config import RunConfig, UsageError
from onepolicy.config.output_paths import check_output_folder
from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.console import Console, make_bars, print_status
from onepolicy.files import write_text_atomically
from onepolicy.launch.arms import Arm, lock_arms, play_arms
from onepolicy.launch.plan_arms import plan_arms, plan_jobs, runs_in
from onepolicy.notation import counted

DEFAULT_ARMS = (
    ("off", "replay.mode=off", "correction.preset=recompute"),
    ("r3", "replay.mode=r3", "correction.preset=recompute"),
)

LONGEST_NAME = 100  # characters of an arm's name


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
    compare.add_argument(
        "recipe", nargs="?", help="TOML recipe, e.g. recipes/routing_gap.toml; before --arm"
    )
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
        "--seeds", nargs="+", type=_seed, metavar="N", help="default: the recipe's seed"
    )
    compare.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at a time (default: as many as there are cores for; 1 on a GPU, with vLLM and "
        "with a server)",
    )
    compare.add_argument(
        "--out",
        metavar="FOLDER",
        help="its runs and comparison.html (default: runs/compare-RECIPE)",
    )
    compare.add_argument(
        "--png",
        action="store_true",
        help="figures/NAME.png too (needs Chromium or Chrome)",
    )


def _seed(word: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", word) or int(word) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no seed (0 to 2^63 - 1); give the recipe and settings before --seeds"
        )
    return int(word)


def run_compare(arguments: argparse.Namespace) -> int:
    """Train the arms that are not finished, then print and draw the comparison."""
    if not arguments.recipe:
        raise UsageError(
            "compare: give the recipe first, e.g. recipes/routing_gap.toml; --arm and --seeds take "
            "all words after them"
        )
    if "WORLD_SIZE" in os.environ:
        raise UsageError(
            "compare: torchrun starts one run; leave it out, with train.ranks=N every run starts "
            "its own processes"
        )
    _check_figures(arguments.png)
    out = Path(arguments.out or f"runs/compare-{Path(arguments.recipe).stem}")
    check_output_folder("--out", out)
    arms = plan_arms(arguments.recipe, arguments.overrides, _named(arguments), arguments.seeds)
    jobs = plan_jobs([each.config for each in arms], arguments.jobs)
    runs = runs_in(out, arms)
    check_train_extra()
    labels = replay_labels({each.name: each.config for each in arms})
    try:
        _play(arguments, out, runs, jobs)
    except KeyboardInterrupt:
        # Before the page, during which a second Ctrl-C may end the command.
        print_status("the same command goes on after the last checkpoints of the runs")
        so_far = _comparable(runs)
        if so_far:
            with suppress(UsageError):  # a damaged log, which the same command will report
                _show(arguments, out, so_far, labels)
        raise
    _show(arguments, out, runs, labels)
    return 0


def _show(
    arguments: argparse.Namespace, out: Path, runs: Sequence[Arm], labels: Mapping[str, str]
) -> None:
    from onepolicy.report.comparison import show_comparison

    shown = [(run.name, run.seed, run.folder, labels.get(run.name, "")) for run in runs]
    show_comparison(shown, out, recipe=Path(arguments.recipe).stem, png=arguments.png)


def _comparable(runs: Sequence[Arm]) -> list[Arm]:
    """Return the runs that have a step, of the seeds of which the first arm and another have."""
    begun = [run for run in runs if run.steps_done]
    seeds = {run.seed for run in begun if run.name == runs[0].name}
    seeds &= {run.seed for run in begun if run.name != runs[0].name}
    return [run for run in begun if run.seed in seeds]


def _named(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the name of every arm with its settings."""
    words = [list(each) for each in arguments.arm or DEFAULT_ARMS]
    names = [name for name, *_ in words]
    for name in names:
        if not re.fullmatch(r"\w[\w.+-]*", name) or len(name) > LONGEST_NAME:
            raise UsageError(
                f"--arm: {name!r} is no name; write --arm NAME a.b=value, with at most "
                f"{LONGEST_NAME} letters, digits, . + - and _"
            )
    if len(set(names)) < len(names) or len(names) < 2:
        raise UsageError(
            f"--arm: {', '.join(names)}; give two arms or more, each with a name of its own"
        )
    return {name: settings for name, *settings in words}


def replay_labels(configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """Return {arm: "without replay" or "with replay"} if two arms differ in nothing else."""
    if len(configs) != 2:
        return {}
    first, other = configs.values()
    if first.model_copy(update={"replay": other.replay, "seed": other.seed}) != other:
        return {}
    names = {
        name: "with replay" if config.replay.mode in ROLLOUT_MODES else "without replay"
        for name, config in configs.items()
    }
    if len(set(names.values())) < 2:
        return {}
    return names


def _check_figures(png: bool) -> None:
    """Raise UsageError if the packages that draw are missing: better now than after training."""
    needed = ["plotly", "jinja2"]
    if png:
        needed.append("kaleido")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"comparison.html needs {', '.join(missing)}; pip install 'onepolicy[report]'"
        )


def _play(arguments: argparse.Namespace, out: Path, runs: Sequence[Arm], jobs: int) -> None:
    """Train the runs that are not finished."""
    waiting = sum(not run.finished for run in runs)
    if not waiting:
        print_status(f"all {len(runs)} runs in {out} are finished")
        return
    with lock_arms(out):
        recipe = out / "recipe.toml"  # runs that start later must not see later changes
        write_text_atomically(recipe, Path(arguments.recipe).read_text(encoding="utf-8"))
        *shorter, most = sorted({run.steps for run in runs})
        steps = " or ".join([*map(str, shorter), counted(most, "step")])
        print_status(
            f"{len(runs)} runs of {steps}, {len(runs) - waiting} of them finished, "
            f"{min(jobs, waiting)} at a time, in {out}"
        )
        _watch(recipe, runs, jobs)


def _watch(recipe: Path, runs: Sequence[Arm], jobs: int) -> None:
    """Train the runs with a progress bar for each, or with lines if stderr is no terminal."""
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), TimeElapsedColumn())
    with make_bars(console, *columns, transient=False) as bars:
        tasks = {
            run: bars.add_task(run.label, total=run.steps, completed=run.steps_done, start=False)
            for run in runs
        }
        begun: set[Arm] = set()

        def watch(run: Arm, ended: bool) -> None:
            done = run.steps_done
            bars.start_task(tasks[run])
            bars.update(tasks[run], completed=done)
            if console.is_terminal:
                return
            if run not in begun:
                begun.add(run)
                print_status(f"{run.label}: begun; its output: {run.console}")
            if ended:
                print_status(f"{run.label}: {done} of {counted(run.steps, 'step')}")

        play_arms(recipe, runs, jobs, watch)
