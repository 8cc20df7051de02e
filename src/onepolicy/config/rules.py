"""A rule between settings, and a check with its reason and its fix. Rules are rows of tables.

The rows of a run: run_rules.py, option_rules.py (contradictions) and idle.py (settings that change
nothing). Sections that are used without a run have rows of their own (`Frozen.rules`).
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from onepolicy.errors import UsageError, printable

Of = TypeVar("Of")
Text = str | Callable[[Of], str]


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, the outcome, the finding, and the way out."""

    name: str
    passed: bool | None  # None: it does not apply, or cannot be decided until another passes
    found: str
    fix: str = ""  # of a check that failed

    def __str__(self) -> str:
        return f"{self.name}: {self.found}; {self.fix}"


def require(checks: Iterable[Check], heading: str = "") -> None:
    """Raise UsageError that names every check that failed, one a line, below the heading."""
    failed = [str(check) for check in checks if check.passed is False]
    if failed and heading:
        failed = [heading, *(f"  {line}" for line in failed)]
    if failed:
        raise UsageError("\n".join(failed))


@dataclass(frozen=True, slots=True)
class Rule(Generic[Of]):
    """Settings that must not be (error), or that change nothing (idle), and why.

    The texts may name values beside them: `{rollout.engine.kind}`.
    """

    setting: str  # dotted path
    when: Callable[[Of], bool]  # true where the rule is broken
    why: Text[Of]
    fix: str = ""
    kind: Literal["error", "idle"] = "error"
    source: str = ""  # address of who found out

    def check(self, of: Of) -> Check:
        """Return the outcome of an error rule, with its texts filled in."""
        fix = self.fix
        if self.source:
            fix = f"{fix} ({self.source})"
        name, why, fix = (_filled(text, of) for text in (self.setting, self.why, fix))
        return Check(name, not self.when(of), why, fix)

    def reason(self, of: Of) -> str:
        """Return why the setting changes nothing, with its values filled in."""
        return _filled(self.why, of)


def broken(rules: Iterable[Rule[Of]], of: Of) -> list[Check]:
    """Return a failed check for every error rule that is broken, in the order of the rows."""
    return [rule.check(of) for rule in rules if rule.kind == "error" and rule.when(of)]


def error(text: str, when: Callable[[Of], bool]) -> Rule[Of]:
    """Return the row of a contradiction from the text that is printed: `setting: why; fix`."""
    setting, _, rest = text.partition(": ")
    why, _, fix = rest.rpartition("; ")
    assert fix, f"expected `setting: why; fix`, got {text!r}"
    return Rule(setting, when, why, fix)


def unused(settings: str, when: Callable[[Of], bool], why: Text[Of]) -> tuple[Rule[Of], ...]:
    """Return rows of settings that change nothing where `when` holds, if they are set.

    settings: dotted paths, separated by spaces. Set is a value that is no default and does not come
    from a preset.
    """

    def is_idle(path: str) -> Callable[[Of], bool]:
        return lambda of: when(of) and is_set(of, path)

    return tuple(Rule(path, is_idle(path), why, kind="idle") for path in settings.split())


def is_set(section: Any, path: str) -> bool:
    """Return whether the setting at this path is not as usual. False where its section is unset."""
    *outer, name = path.split(".")
    for key in outer:
        section = getattr(section, key)
        if section is None:
            return False
    return bool(getattr(section, name) != section.usual(name))


def each_once(values: Sequence[object]) -> bool:
    """Return whether there are values, none of them twice."""
    return 0 < len(set(values)) == len(values)


def value_at(section: Any, path: str) -> Any:
    """Return the setting at this path."""
    for key in path.split("."):
        section = getattr(section, key)
    return section


def written(value: object) -> str:
    """Return a value as a recipe has it."""
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if isinstance(value, tuple):
        text = f"[{', '.join(map(str, value))}]"
    return printable(text)[:200]


def _filled(text: Text[Of], of: Of) -> str:
    if callable(text):
        return text(of)
    return _TEXTS.vformat(text, (of,), {})


class _Texts(string.Formatter):
    """str.format, but a list or a truth value is written as a recipe has it."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return getattr(args[0], str(key))

    def format_field(self, value: Any, format_spec: str) -> Any:
        if not format_spec and isinstance(value, bool | tuple):
            return written(value)
        return super().format_field(value, format_spec)


_TEXTS = _Texts()
