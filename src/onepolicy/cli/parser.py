"""The argument parser of every command, with examples in its help and hints on mistakes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from onepolicy.config.base import VARIANT_KEYS, Frozen
from onepolicy.config.spelling import closest_name, did_you_mean, paths_of, similar_settings
from onepolicy.errors import printable

SAME_OPTION = 0.65
"""Least similarity (difflib) at which an option is suggested: --out for --output."""

OTHER_WORDS = {
    "report": "train and compare write their pages themselves, measure and audit with --out FOLDER",
    "preset": "write: onepolicy config preset",
    "presets": "write: onepolicy config preset",
}
"""Words that users try as commands -> where to find what they mean."""
MISSING = "the following arguments are required: "
"""Begin of argparse's message, before names with commas."""
SETTINGS = """\
settings:
  A recipe is a TOML file. After it, any setting can be changed as a.b=value, without dashes.
  `onepolicy config RECIPE [a.b=value ...]` prints the effective settings, defaults included.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser with hints on mistakes. Parsers of commands are of this class too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **kwargs)
        self.settings: type[Frozen] | None = None
        self.ignored: tuple[str, ...] = ()  # settings without effect in this command
        self.examples: tuple[str, ...] = ()
        self.more_help: Callable[[], str] | None = None  # text that only --help computes

    def set_help(
        self,
        *,
        examples: Iterable[str],
        settings: type[Frozen] | None = None,
        ignored: Iterable[str] = (),
    ) -> None:
        """Set the examples of the help, and the config that `a.b=value` changes."""
        self.examples, self.settings, self.ignored = tuple(examples), settings, tuple(ignored)
        shown = "".join(f"  {example}\n" for example in self.examples)
        self.epilog = f"examples:\n{shown}"
        if settings:
            self.epilog += f"\n{SETTINGS}"

    def format_help(self) -> str:
        """Return the help, with `more_help` at its end."""
        text = super().format_help()
        if self.more_help is None:
            return text
        return f"{text}\n{self.more_help()}\n"

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is None:
            args = sys.argv[1:]
        words = list(args)
        self._refuse_unknown_command(words)
        self._refuse_dashes(words)
        return super().parse_known_args(words, namespace)

    def subcommands(self) -> dict[str, Parser]:
        """Return the parsers of the commands by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def error(self, message: str) -> NoReturn:
        """Name what is missing with an example; leave other messages to argparse."""
        if not message.startswith(MISSING) or not self.examples:
            super().error(message)
        words = message.removeprefix(MISSING).split(", ")
        missing = [word for word in words if not word.endswith("=value")]
        command = self.prog.removeprefix("onepolicy ")
        self.exit_with_error(
            f"{command}: give the {' and '.join(missing)}, e.g. {self.examples[0]}"
        )

    def exit_with_error(self, text: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"onepolicy: {printable(text)}\n")

    def _refuse_unknown_command(self, words: list[str]) -> None:
        known = self.subcommands()
        word = next((each for each in words if not each.startswith("-")), None)
        if not known or word is None or word in known:
            return
        hint = did_you_mean(word, known)
        if word in OTHER_WORDS and "train" in known:
            hint = f"; {OTHER_WORDS[word]}"
        if word.endswith(".toml") and "train" in known:
            hint = f"; did you mean {self.prog} train {word}?"
        self.exit_with_error(f"{word!r} is no command; there are {', '.join(known)}{hint}")

    def _refuse_dashes(self, words: list[str]) -> None:
        """Refuse unknown options, and tell how the settings that they resemble are written."""
        wrong, right = [], []
        for place, word in enumerate(words):
            if word == "--" or (self.subcommands() and not word.startswith("-")):
                break
            if not self._is_unknown_option(word):
                continue
            option, sign, value = word.partition("=")
            setting = self._meant_setting(option.lstrip("-"))
            if setting is None:
                self.exit_with_error(self._describe_unknown(option))
            following = [*words, "-"][place + 1]
            is_value = _is_number(following) or not following.startswith("-")
            if not sign and is_value and "=" not in following:
                word, value = f"{word} {following}", following
            wrong.append(word)
            right.append(f"{setting}={value or '...'}")
        if right:
            self.exit_with_error(
                f"settings have no dashes: write {' '.join(right)} for {' '.join(wrong)}"
            )

    def _is_unknown_option(self, word: str) -> bool:
        name = word.partition("=")[0]
        if not word.startswith("-") or word == "-" or _is_number(word):
            return False
        if name.startswith("--"):
            return not any(known.startswith(name) for known in self._option_string_actions)
        return name[:2] not in self._option_string_actions

    def _meant_setting(self, option: str) -> str | None:
        """Return the setting that an option of this name was probably meant for.

        For a section it is the setting that names the variant, as in rollout.engine.kind.
        """
        if self.settings is None:
            return None
        name = option.replace("-", "_")
        paths = [each for each in paths_of(self.settings) if each not in self.ignored]
        found = [name]
        if name not in paths:
            found = similar_settings(name, paths, alike=self._similar_option(option) is None)
        if not found:
            return None
        if not any(each.startswith(f"{found[0]}.") for each in paths):
            return found[0]
        variants = [f"{found[0]}.{each}" for each in (*VARIANT_KEYS, "path")]
        return next((each for each in variants if each in paths), None)

    def _options(self) -> list[str]:
        return [each[2:] for each in self._option_string_actions if each.startswith("--")]

    def _similar_option(self, name: str) -> str | None:
        return closest_name(name, self._options(), SAME_OPTION)

    def _describe_unknown(self, option: str) -> str:
        text = f"{self.prog} has no option {option}"
        similar = self._similar_option(option.lstrip("-"))
        if similar is not None:
            text += f"; did you mean --{similar}?"
        text += f"; options: --{', --'.join(self._options())}"
        if self.settings:
            text += "; settings have no dashes: a.b=value"
        return text


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
