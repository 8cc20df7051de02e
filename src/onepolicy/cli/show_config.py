"""`onepolicy config`: print the effective settings of a recipe, or a preset."""

from __future__ import annotations

import argparse

from onepolicy.cli.common import Commands, add_command, check_train_extra, warn_idle
from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.idle import idle_settings
from onepolicy.config.presets import names_by_question
from onepolicy.console import print_text
from onepolicy.correct.equations import show, show_all, translations
from onepolicy.objective.presets import describe_presets


def add_config(commands: Commands) -> None:
    """Add the command `config`."""
    config = add_command(
        commands,
        "config",
        "print the effective settings of a recipe as TOML, or a preset",
        run_config,
        examples=(
            "onepolicy config recipes/quickstart.toml optim.lr=5e-5 > mine.toml",
            "onepolicy config preset icepop",
            "onepolicy config preset --from verl",
            "onepolicy config objective gspo",
        ),
        settings=RunConfig,
    )
    config.more_help = names_by_question
    config.add_argument(
        "recipe",
        help="TOML recipe; or `preset [NAME]`, `objective [NAME]`: a correction or objective",
    )
    config.add_argument(
        "--from",
        dest="framework",
        nargs="?",
        const="",
        metavar="FRAMEWORK",
        help="with `preset`: what another framework calls its corrections and objectives, and what "
        "to write for them here",
    )
    config.add_argument("overrides", nargs="*", metavar="a.b=value")


def run_config(arguments: argparse.Namespace) -> None:
    """Print the settings of a recipe as TOML, or one or all presets."""
    recipe, overrides = arguments.recipe, arguments.overrides
    if recipe in ("preset", "objective"):
        if len(overrides) > 1:
            raise UsageError(f"config {recipe}: one name, not {' '.join(overrides)}")
        text = _presets(recipe, arguments.framework, *overrides)
    elif arguments.framework is not None:
        raise UsageError(f"--from: goes with `config preset`, not with {recipe!r}; leave it out")
    elif recipe in ("presets", "objectives"):
        raise UsageError(f"config {recipe}: write: onepolicy config {recipe.removesuffix('s')}")
    else:
        text = _settings(recipe, overrides)
    print_text(text)


def _settings(recipe: str, overrides: list[str]) -> str:
    check_train_extra(["tomlkit>=0.13"])
    from onepolicy.config.as_toml import as_toml

    config = load(recipe, overrides)
    warn_idle(idle_settings(config))
    return as_toml(config)


def _presets(kind: str, framework: str | None, *name: str) -> str:
    if framework is not None:
        if name:
            raise UsageError(f"--from: lists all of {framework}; leave {name[0]!r} out")
        return translations(framework)
    if kind == "objective":
        return describe_presets(*name)
    if name:
        return show(*name)
    return show_all()
