"""The argument parser of every command: examples at the end of its help, and mistakes answered with what was meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from onepolicy.config.base import Frozen, printable
from onepolicy.config.load import VARIANT
from onepolicy.config.near import did_you_mean, near, paths_of, settings_like, settings_named

SAME_OPTION = 0.65
"""Least similarity (difflib) of two options: --output is --out."""

SETTINGS = """\
settings:
  A recipe is a TOML file; any setting can be changed behind it as a.b=value, without dashes.
  `onepolicy config RECIPE [a.b=value ...]` prints the effective settings, defaults included.
"""


class Parser(argparse.ArgumentParser):
    """Refuses what argparse would only call unrecognized. Parsers of commands are of this class too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **kwargs)
        self.settings: type[Frozen] | None = None
        self.ignored: tuple[str, ...] = ()  # settings that mean nothing to this command
        self.examples: tuple[str, ...] = ()

    def describe(
        self,
        *,
        examples: Iterable[str],
        settings: type[Frozen] | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        """Take over the examples of the help, and the kind of settings that `a.b=value` sets."""
        self.examples, self.settings, self.ignored = tuple(examples), settings, tuple(ignored)
        shown = "".join(f"  {example}\n" for example in self.examples)
        self.epilog = f"examples:\n{shown}" + (f"\n{SETTINGS}" if settings else "")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_command(words)
        self._refuse_dashes(words)
        return super().parse_known_args(words, namespace)

    def commands(self) -> dict[str, Parser]:
        """Return the parsers of this one's commands by name."""
        groups = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        return dict(groups[0].choices) if groups else {}

    def refuse(self, text: str) -> NoReturn:
        self.exit(2, f"onepolicy: {printable(text)}\n")

    def _refuse_unknown_command(self, words: list[str]) -> None:
        known = self.commands()
        word = next((each for each in words if not each.startswith("-")), None)
        if not known or word is None or word in known:
            return
        hint = did_you_mean(word, known)
        if word.endswith(".toml") and "train" in known:
            hint = f"; did you mean {self.prog} train {word}?"
        self.refuse(f"{word!r} is no command; there are {', '.join(known)}{hint}")

    def _refuse_dashes(self, words: list[str]) -> None:
        """Refuse an option that this command lacks; say how the setting is written that it was meant for."""
        typed, meant = [], []
        for place, word in enumerate(words):
            if word == "--" or (self.commands() and not word.startswith("-")):
                break
            if not self._is_unknown_option(word):
                continue
            option, sign, value = word.partition("=")
            if (setting := self._setting(option.lstrip("-"))) is None:
                self.refuse(self._no_option(option))
            behind = words[place + 1] if place + 1 < len(words) else "-"
            is_value = _is_number(behind) or not behind.startswith("-")
            if not sign and is_value and "=" not in behind:
                word, value = f"{word} {behind}", behind
            typed.append(word)
            meant.append(f"{setting}={value or '...'}")
        if meant:
            self.refuse(f"settings have no dashes: write {' '.join(meant)} for {' '.join(typed)}")

    def _is_unknown_option(self, word: str) -> bool:
        name = word.partition("=")[0]
        if not word.startswith("-") or word == "-" or _is_number(word):
            return False
        long = name.startswith("--")
        return not any(
            known.startswith(name) if long else known == name[:2]
            for known in self._option_string_actions
        )

    def _setting(self, name: str) -> str | None:
        """The setting that an option of this name was meant for; of a section the one that names what it is."""
        if self.settings is None:
            return None
        paths = [each for each in paths_of(self.settings) if each not in self.ignored]
        name = name.replace("-", "_")
        found = [name] if name in paths else settings_named(name, paths)
        if not found:
            renamed = self.settings.renamed.items()
            found = [new for old, new in renamed if name in (old, old.rpartition(".")[2])]
        if not found and self._option(name) is None:
            found = settings_like(name, paths)
        if not found:
            return None
        inside = [each for each in paths if each.startswith(f"{found[0]}.")]
        if not inside:
            return found[0]
        return next(
            (f"{found[0]}.{each}" for each in (*VARIANT, "path") if f"{found[0]}.{each}" in inside),
            None,
        )

    def _options(self) -> list[str]:
        return [each[2:] for each in self._option_string_actions if each.startswith("--")]

    def _option(self, name: str) -> str | None:
        return near(name, self._options(), SAME_OPTION)

    def _no_option(self, option: str) -> str:
        meant = self._option(option.lstrip("-"))
        hint = "" if meant is None else f"; did you mean --{meant}?"
        text = (
            f"{self.prog} has no option {option}{hint}; options: --{', --'.join(self._options())}"
        )
        return text + ("; settings have no dashes: a.b=value" if self.settings else "")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
