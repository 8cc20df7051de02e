"""`onepolicy config`: print the effective settings of a recipe, or a preset."""

from __future__ import annotations

import argparse

from onepolicy.cli.common import Commands, add_command, warn_idle
from onepolicy.cli.train_extra import check_train_extra
from onepolicy.config import RunConfig, UsageError, load
from onepolicy.config.idle import idle_settings
from onepolicy.console import print_text


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
            "onepolicy config objective gspo",
        ),
        settings=RunConfig,
    )
    config.add_argument(
        "recipe",
        help="TOML recipe; or `preset [NAME]`, `objective [NAME]`: a correction or objective",
    )
    config.add_argument("overrides", nargs="*", metavar="a.b=value")


def run_config(arguments: argparse.Namespace) -> None:
    """Print the settings of a recipe as TOML, or one or all presets."""
    print_text(_settings(arguments.recipe, arguments.overrides))


def _settings(recipe: str, overrides: list[str]) -> str:
    if recipe in ("preset", "objective"):
        if len(overrides) > 1:
            raise UsageError(f"config {recipe}: one name, not {' '.join(overrides)}")
        return _presets(recipe, *overrides)
    check_train_extra(["tomlkit>=0.13"])
    from onepolicy.config.as_toml import as_toml

    config = load(recipe, overrides)
    warn_idle(idle_settings(config))
    return as_toml(config)


def _presets(kind: str, *name: str) -> str:
    if kind == "objective":
        from onepolicy.objective import presets

        return presets.describe_presets(*name)
    from onepolicy.correct.equations import show, show_all

    if name:
        return show(*name)
    return show_all()
