"""The command line: measure, audit, train, eval, make-policy, engine, plan, config. Bad input: a message, exit 2."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onepolicy.cli import engine, measure, plan
from onepolicy.cli.common import RUN_ONLY, command, launcher_for, prepare_process, say
from onepolicy.cli.parser import SETTINGS, Parser
from onepolicy.cli.stopped import interrupted, telling_of_sigterm
from onepolicy.cli.streams import tolerant
from onepolicy.config import (
    NotThere,
    RunConfig,
    TrainingError,
    UsageError,
    load,
    printable,
    read_recipe,
    resolve,
)
from onepolicy.config.load import parse_value, resolve_as
from onepolicy.config.place import check_folder, check_new, check_place, check_resumable, claimed
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.present import check_model, check_present, check_task
from onepolicy.config.stored import CONFIG, read_config

CHECKPOINTS, RUN = (
    "checkpoints",
    "run.json",
)  # of a run folder: run/run_folder.py, which needs torch
RESULT_IN_FILES = (
    "train",
    "make-policy",
)  # their exit status does not depend on what could be printed
EXIT_CODES = """\
exit codes:
  0    done (measure, audit and eval: whatever they found)
  1    it began well and failed: a run that stopped, bits that differ (--numerics on-policy), a failed engine check,
       a plan that does not fit, output that could not be written
  2    a mistake in the command, a setting, a path or the data; the message names it and what to do
  75   a server or cluster does not answer yet; the same command may work later (train --restarts tries again)
  130  stopped by Ctrl-C
"""
WRONG_PLACE = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


def main(argv: list[str] | None = None) -> int:
    with tolerant() as streams:
        try:
            arguments = parse(argv)
        except SystemExit as end:  # help, or a mistake that argparse has explained
            if end.code or (why := streams.lost()) is None:
                raise
            return _lost(why)
        with telling_of_sigterm(arguments):
            status = _run(arguments)
        why = streams.lost()
        if (
            why is not None
            and status == 0
            and _lost(why)
            and arguments.command not in RESULT_IN_FILES
        ):
            return 1
        return status


def _run(arguments: argparse.Namespace) -> int:
    """Run the command; its exit status."""
    try:
        return int(arguments.run(arguments) or 0)
    except UsageError as error:
        print(f"onepolicy: {error}", file=sys.stderr)
        return NotThere.EXIT if isinstance(error, NotThere) else 2
    except TrainingError as error:
        print(f"onepolicy: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.filename is None or error.errno is None:
            raise
        mend = "check that the path is right, and who may read and write it"
        print(
            f"onepolicy: {printable(str(error.filename))}: {error.strerror}; {mend}",
            file=sys.stderr,
        )
        return 2 if error.errno in WRONG_PLACE else 1
    except KeyboardInterrupt:
        return interrupted(arguments)


def _lost(why: str) -> int:
    print(f"onepolicy: stdout: {why}; not all of what was printed has arrived", file=sys.stderr)
    return 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments. Settings may stand behind options too, where argparse by itself takes them for a mistake."""
    top = parser()
    if any("\0" in word for word in argv or ()):
        top.error("an argument has a NUL character in it")
    arguments, rest = top.parse_known_args(argv)
    if rest and (
        not hasattr(arguments, "overrides") or any(w.startswith("-") or "=" not in w for w in rest)
    ):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def parser() -> Parser:
    top = Parser(
        prog="onepolicy",
        description="RL for LLMs with one policy: measure, remove and correct the rollout/training mismatch.",
        epilog=f"{SETTINGS}\n{EXIT_CODES}",
    )
    commands = top.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )

    train = command(
        commands,
        "train",
        "train a policy; resume or fork a run",
        run_train,
        examples=(
            "onepolicy train recipes/quickstart.toml",
            "onepolicy train recipes/quickstart.toml replay.mode=off optim.lr=5e-5 out=runs/no-replay",
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

    evaluate = command(
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

    policy = command(
        commands,
        "make-policy",
        'make and warm up the tiny MoE policy `model.path = "tiny"` names',
        run_make_policy,
        examples=(
            "onepolicy make-policy",
            "onepolicy make-policy --out runs/policy task.kind=gym task.name=chain_sum steps=400",
        ),
        settings=PolicyConfig,
    )
    policy.add_argument("--out", help="folder to write to (default: the user's cache)")
    policy.add_argument(
        "overrides",
        nargs="*",
        metavar="a=value",
        help="e.g. task.kind=gym task.name=chain_sum steps=400 seed=1",
    )

    measure.add(commands)

    audit = command(
        commands,
        "audit",
        "what another framework's dump says of its rollout/training mismatch",
        run_audit,
        examples=(
            "onepolicy audit dump.parquet --out runs/audited",
            "onepolicy audit dump.parquet --columns logp_trainer=old_log_probs",
            "onepolicy audit before.jsonl after.jsonl",
        ),
    )
    audit.add_argument(
        "dump",
        type=Path,
        help=".parquet, .jsonl, .npz, .safetensors, .pt or a folder; docs/audit.md",
    )
    audit.add_argument("other", type=Path, nargs="?", help="a second dump, shown side by side")
    audit.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="a column of ours under another name (repeatable); or prime-rl: the names of its token export",
    )
    audit.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write FOLDER/audit.html, audit.json and figures/*.json",
    )
    audit.add_argument(
        "--png",
        action="store_true",
        help="and figures/*.png (with kaleido, in the system's Chromium)",
    )

    engine.add(commands)
    plan.add(commands)

    config = command(
        commands,
        "config",
        "print the effective settings of a recipe as TOML, or a preset",
        run_config,
        examples=(
            "onepolicy config recipes/quickstart.toml optim.lr=5e-5 > mine.toml",
            "onepolicy config preset icepop",
            "onepolicy config objective gspo",
        ),
        settings=RunConfig,
    )
    config.add_argument(
        "recipe",
        help="TOML recipe; or `preset [NAME]`, `objective [NAME]`: a correction or objective",
    )
    config.add_argument("overrides", nargs="*", metavar="a.b=value")
    return top


def run_train(arguments: argparse.Namespace) -> int:
    if _rank() > 0 and "WORLD_SIZE" in os.environ:  # started by torchrun; rank 0 drives it
        prepare_process(None)
        from onepolicy.launch.rank_main import run_launched_rank

        return run_launched_rank()
    overrides = list(arguments.overrides)
    if arguments.resume or arguments.fork:
        overrides = (
            [arguments.recipe, *overrides] if arguments.recipe else overrides
        )  # argparse put the first one there
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
    say(f"reading {arguments.recipe}")
    with _placed(load(arguments.recipe, overrides), overrides) as config:
        check_present(config, evaluates=config.eval.every > 0)
        arguments.folder = Path(config.out)
        print(f"run folder: {config.out}", flush=True)
        prepare_process(config.train.threads)
        say(f"loading {config.model.path}")
        from onepolicy.run import train as run
        from onepolicy.run.progress import terminal_progress

        with (
            terminal_progress(config.steps) as progress,
            launcher_for(config, progress) as launcher,
        ):
            summary = run.start_run(config, progress, launcher=launcher)
    return _show(summary)


def _rank() -> int:
    """This process's place among torchrun's, 0 without torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            value = os.environ[name]
            raise UsageError(
                f"{name}: {value!r} in the environment is no number; torchrun sets it, or unset it"
            )
    return int(os.environ.get("RANK", "0"))


@contextmanager
def _placed(config: RunConfig, overrides: list[str]) -> Iterator[RunConfig]:
    """The same settings with a run folder that is free: a recipe's own `out` is numbered on where a run lies already,
    or is about to.

    UsageError for an `out` that was typed and is not free.
    """
    if _typed_out(overrides) is not None:
        check_new(Path(config.out))
        yield config
        return
    with claimed(Path(config.out)) as out:
        if out != Path(config.out):
            config = config.model_copy(update={"out": str(out)})
        yield config


def _typed_out(overrides: list[str]) -> Path | None:
    """The run folder that was typed as out=..."""
    typed = [override.removeprefix("out=") for override in overrides if override.startswith("out=")]
    return Path(str(parse_value(typed[-1]))) if typed else None


def _supervise(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """The same command in a process of its own, resumed when that dies."""
    from onepolicy.launch.restarts import supervise

    if arguments.restarts < 0 or "WORLD_SIZE" in os.environ:
        mend = (
            "torchrun starts its processes again itself (--max-restarts)"
            if arguments.restarts > 0
            else "0 or more"
        )
        raise UsageError(f"--restarts: {arguments.restarts}; {mend}")
    if arguments.resume:
        out, first = Path(arguments.resume), ["train", "--resume", arguments.resume, *overrides]
        check_resumable(out)
    elif arguments.fork:
        out = _fork_out(overrides)
        first = ["train", "--from", arguments.fork, *overrides]
    else:
        with _placed(load(arguments.recipe, overrides), overrides) as config:
            out = Path(config.out)
            first = ["train", arguments.recipe, *overrides]
            if _typed_out(overrides) is None:  # or each start would take another
                first.append(f"out={json.dumps(str(out), ensure_ascii=False)}")
            return supervise(out, first, ["train", "--resume", str(out)], arguments.restarts, say)
    resume = first if arguments.resume else ["train", "--resume", str(out)]
    return supervise(out, first, resume, arguments.restarts, say)


def _resume(arguments: argparse.Namespace, overrides: list[str]) -> int:
    path = Path(arguments.resume)
    changed: dict[str, int] = {}
    moved: list[str] = []
    for override in overrides:
        name, _, value = override.partition("=")
        if name.startswith("cluster.") or name in (
            "rollout.engine.url",
            "rollout.engine.token_env",
            "train.rank_timeout",
        ):
            moved.append(override)
            continue
        number = int(value) if value.isascii() and value.isdigit() else -1
        if name not in ("steps", "train.ranks") or number < (name == "steps"):
            raise UsageError(
                "--resume: only steps=N, train.ranks=N, train.rank_timeout, rollout.engine.url, "
                "rollout.engine.token_env and cluster.* may change, not "
                f"{override!r}; change settings with --from {path}"
            )
        changed[name] = number
    steps = changed.get("steps")
    say(f"reading {path}")
    check_resumable(path)
    config = read_config(path)
    arguments.folder = path
    if moved:
        config = resolve(config.model_dump(), moved)
    check_task(config.task, config.eval.problems if config.eval.every else 0)
    prepare_process(config.train.threads)
    say(f"loading the newest checkpoint of {path}")
    from onepolicy.run import train as run
    from onepolicy.run.progress import terminal_progress

    with (
        terminal_progress(steps or config.steps) as progress,
        launcher_for(config, progress) as launcher,
    ):
        summary = run.resume_run(
            path, progress, steps, changed.get("train.ranks"), launcher, config
        )
    return _show(summary)


def _fork_out(overrides: list[str]) -> Path:
    """The folder of the new run, which is free."""
    out = _typed_out(overrides)
    if out is None:
        raise UsageError("--from: give the new run a folder with out=...")
    check_new(out)
    return out


def _fork(arguments: argparse.Namespace, overrides: list[str]) -> int:
    source = Path(arguments.fork)
    arguments.folder = _fork_out(overrides)
    _refuse_other_weights(overrides, f"--from {source}")
    say(f"reading {source}")
    config = _forked(read_config(_run_of(source)), overrides)
    check_task(config.task, config.eval.problems if config.eval.every else 0)
    prepare_process(None)
    say(f"loading a checkpoint of {source}")
    from onepolicy.run import run_folder
    from onepolicy.run import train as run
    from onepolicy.run.progress import terminal_progress

    _, origin = run_folder.fork_origin(source)
    with (
        terminal_progress(config.steps, origin.step) as progress,
        launcher_for(config, progress) as launcher,
    ):
        summary = run.start_run(config, progress, origin, launcher)
    return _show(summary)


def _run_of(source: Path) -> Path:
    """The run folder that RUN, RUN/STEP or RUN/checkpoints/step_NNNNN names."""
    for run in (source, source.parent, source.resolve().parent.parent):
        if (run / CHECKPOINTS).is_dir() and (run / CONFIG).is_file():
            return run
    raise UsageError(
        f"{source}: no such checkpoint; there is none; give a run folder (it has {CONFIG} and {CHECKPOINTS}/) or "
        "RUN/STEP"
    )


def _forked(parent: RunConfig, overrides: list[str]) -> RunConfig:
    tree = parent.model_dump()
    implied = {name: value for name, value in tree.items() if name != "correction"}
    if resolve(implied).correction == parent.correction:
        tree = implied  # it followed replay.mode in the parent, so it follows it in the fork
    return resolve(tree, overrides)


def run_eval(arguments: argparse.Namespace) -> None:
    path = Path(arguments.recipe)
    say(f"reading {path}")
    _refuse_no_run(path)
    tree = read_config(path).model_dump() if path.is_dir() else read_recipe(path)
    if path.is_dir():
        _refuse_other_weights(arguments.overrides, f"eval {path}")
    config = resolve({"out": "unused", "steps": 1, **tree}, arguments.overrides)
    if arguments.step is not None and not path.is_dir():
        raise UsageError(
            f"--step: {path} is a recipe, not a run folder; set model.path=... instead"
        )
    if not path.is_dir():
        check_model(config.model.path)
    check_task(config.task, config.eval.problems)
    prepare_process(config.train.threads)
    say(
        f"loading {'a checkpoint of ' if path.is_dir() else ''}{path if path.is_dir() else config.model.path}"
    )
    from onepolicy.run.eval_command import evaluate_model

    evaluate_model(config, path if path.is_dir() else None, arguments.step)


def _refuse_no_run(path: Path) -> None:
    """UsageError for what is neither a run folder nor a recipe, with the command for a checkpoint."""
    named = re.fullmatch(r"(?:step_)?0*([0-9]{1,15})", path.name)
    if named and (
        run := next((each for each in path.parents[:2] if (each / CHECKPOINTS).is_dir()), None)
    ):
        raise UsageError(
            f"{path}: eval takes a run folder; for its checkpoint give {run} --step {named[1]}"
        )
    if (
        path.is_dir()
        and (path / CONFIG).is_file()
        and not (path / RUN).is_file()
        and not (path / CHECKPOINTS).is_dir()
    ):
        raise UsageError(f"{path}: a model, not a run; give a recipe and model.path={path}")
    if (path.is_dir() and (path / CONFIG).is_file()) or path.is_file() or path.suffix == ".toml":
        return
    raise UsageError(
        f"{path}: no such run or checkpoint, and no recipe; give a run folder (it has {CONFIG} and {CHECKPOINTS}/), "
        "with --step N for one of its checkpoints, or the path of a .toml recipe"
    )


def run_make_policy(arguments: argparse.Namespace) -> None:
    say("reading the settings of the policy")
    config = resolve_as(PolicyConfig, {}, arguments.overrides)
    if arguments.out:
        check_place("--out", Path(arguments.out))
    check_task(config.task)
    prepare_process(config.threads)
    from onepolicy.run.make_policy import make_policy

    make_policy(config, Path(arguments.out) if arguments.out else None)


def run_audit(arguments: argparse.Namespace) -> None:
    if arguments.out is not None:
        check_folder("--out", arguments.out)
    paths = [path for path in (arguments.dump, arguments.other) if path is not None]
    say(f"reading {' and '.join(map(str, paths))}")
    for path in paths:
        if not os.path.lexists(path):
            raise UsageError(f"{path}: no such file; give a dump, or a folder of dumps")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    say("loading torch")
    from rich.console import Console

    from onepolicy.audit import run, schema

    run.run_audit(
        paths, schema.parse_columns(arguments.columns), arguments.out, Console(), png=arguments.png
    )


def run_config(arguments: argparse.Namespace) -> None:
    print(_settings(arguments))


def _settings(arguments: argparse.Namespace) -> str:
    if arguments.recipe == "preset":
        from onepolicy.correct.presets import show, show_all

        if len(arguments.overrides) > 1:
            raise UsageError(f"config preset: one name, not {' '.join(arguments.overrides)}")
        return show(arguments.overrides[0]) if arguments.overrides else show_all()
    if arguments.recipe == "objective":
        from onepolicy.objective import presets

        if len(arguments.overrides) > 1:
            raise UsageError(f"config objective: one name, not {' '.join(arguments.overrides)}")
        return presets.show(*arguments.overrides)
    from onepolicy.config.as_toml import as_toml

    return as_toml(load(arguments.recipe, arguments.overrides))


def _refuse_other_weights(overrides: list[str], command: str) -> None:
    for override in overrides:
        if override.startswith("model.path="):
            raise UsageError(
                f"{override}: has no effect, {command} uses the weights of its checkpoint; leave it out"
            )


def _show(summary: dict[str, Any]) -> int:
    from rich.console import Console

    from onepolicy.report.terminal import summary_table

    Console().print(summary_table(summary))
    return 0
