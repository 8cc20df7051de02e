"""Messages for settings that pydantic refuses: one line a problem, with field, value and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from onepolicy.config.base import VARIANT_KEYS, Frozen
from onepolicy.config.run import RunConfig
from onepolicy.config.secrets import show_value
from onepolicy.config.spelling import classes_of, did_you_mean, hint, paths_of

MOST_PROBLEMS = 20  # that are described; a stranger's file may have 100,000
Problem = Mapping[str, Any]
Location = tuple[int | str, ...]


class Place(NamedTuple):
    """A place in the settings, which pydantic gives as keys and names of variants."""

    path: str  # as a recipe has it
    classes: list[type[Frozen]]  # of the section there, one for each variant; none for a value
    variant: str  # ` with mode=off` if the last key was the name of a variant

    def names(self) -> list[str]:
        """Return the names of the settings that can stand here."""
        if len(self.classes) == 1:
            return list(self.classes[0].model_fields)
        return [_tag(self.classes)] if self.classes else []


def _list_of(where: str, value: object) -> str:
    """Return how to write a list. The shell has taken the quotes out of a text like [a, b]."""
    if not (isinstance(value, str) and value.startswith("[") and value.endswith("]")):
        return f"{where}=[...]"
    names = ", ".join(f'"{name.strip()}"' for name in value[1:-1].split(","))
    return f"'{where}=[{names}]' with both kinds of quotes, which the shell takes away"


def describe_errors(error: ValidationError, kind: type[Frozen] = RunConfig) -> str:
    """Return one line per problem: field, value, fix."""
    problems = [
        problem
        for problem in error.errors()
        if problem["type"] != "default_factory_not_called"  # follows from another problem
    ]
    if len(problems) > MOST_PROBLEMS:
        more = len(problems) - MOST_PROBLEMS
        return f"{_lines(problems[:MOST_PROBLEMS], kind)}\nand {more:,} more problems"
    return _lines(problems, kind)


def _lines(problems: list[Any], kind: type[Frozen]) -> str:
    places = [problem["loc"] for problem in problems]
    return "\n".join(
        _describe(problem, kind)
        for problem in problems
        if problem["type"] != "too_short" or not _refused_inside(problem["loc"], places)
    )


def _shown(problem: Problem, value: Any) -> str:
    """Return a part of the value that was refused: short, and without secrets."""
    # An unknown setting may be a parameter of the task that was given one level too high.
    return show_value(problem["loc"], value, free=problem["type"] == "extra_forbidden")


def _refused_inside(location: Location, places: list[Location]) -> bool:
    """Return whether entries of a list were refused, so that it counts as too short."""
    return any(len(each) > len(location) and each[: len(location)] == location for each in places)


def _describe(problem: Problem, kind: type[Frozen]) -> str:
    location, value, context = problem["loc"], problem["input"], problem.get("ctx", {})
    place = _place(kind, location)
    where, shown = place.path, _shown(problem, value)
    match problem["type"]:
        case "extra_forbidden":
            section = _place(kind, location[:-1])
            suggestion = hint(where, section.names(), paths_of(kind))
            return f"{where}: unknown setting{section.variant} (value {shown}){suggestion}"
        case "union_tag_invalid":
            name = context["discriminator"].strip("'")
            return f"{where}.{name}: {_none_of(problem, context['tag'], context['expected_tags'])}"
        case "union_tag_not_found":
            name = context["discriminator"].strip("'")
            return f"{where}.{name}: required, but not set; give it first"
        case "literal_error" | "enum":
            return f"{where}: {_none_of(problem, value, context['expected'])}"
        case "missing":
            in_list = any(isinstance(key, int) for key in location)  # overrides cannot reach there
            override = "" if in_list else f" or give {where}=..."
            return f"{where}: required, but not set; add it to the recipe{override}"
        case "model_type" | "model_attributes_type":
            meant = _meant(place, shown.strip("'"))
            return f"{where}: {shown} is a value, but this is a section{meant}"
        case "tuple_type" | "list_type":
            return f"{where}: {shown} is no list; write {_list_of(where, value)}"
        case "value_error":
            return str(problem["msg"]).removeprefix("Value error, ")
        case _:
            return f"{where}: {problem['msg']} (value {shown})"


def _none_of(problem: Problem, value: Any, expected: str) -> str:
    """Return `VALUE is none of ...`. expected: as pydantic lists choices, `'a', 'b' or 'c'`."""
    listed = expected.replace(" or ", ", ")
    choices = [each.strip("'") for each in listed.split(", ")]
    return f"{_shown(problem, value)} is none of {listed}{did_you_mean(value, choices)}"


def _meant(place: Place, value: Any) -> str:
    """Return the setting that a value given to a whole section was probably meant for."""
    names = place.names()
    name = next((each for each in ("preset", "kind") if each in names), "")
    if len(names) == 1:
        name = names[0]
    if not name:
        return f"; its settings: {', '.join(sorted(names))}"
    if place.path.rpartition(".")[2].isdecimal():
        return f'; did you mean {{ {name} = "{value}" }}?'
    return f"; did you mean {place.path}.{name}={value}?"


def _place(kind: type[Frozen], location: Location) -> Place:
    """Return the place of a location, without the names of variants that pydantic adds to it."""
    classes, names, variant = [kind], [], ""
    for key in location:
        chosen = [each for each in classes if len(classes) > 1 and key in _tag_values(each)]
        if chosen:
            variant = f" with {_tag(classes)}={key}"
            classes = chosen
            continue
        names.append(str(key))
        variant = ""
        if isinstance(key, str):
            fields = [each.model_fields[key] for each in classes if key in each.model_fields]
            found = [inner for field in fields for inner in classes_of(field.annotation)]
            classes = list(dict.fromkeys(found))
    return Place(".".join(names), classes, variant)


def _tag(classes: list[type[Frozen]]) -> str:
    """Return the setting that chooses among these variants of a section."""
    return next(name for name in VARIANT_KEYS if name in classes[0].model_fields)


def _tag_values(variant: type[Frozen]) -> tuple[Any, ...]:
    return get_args(variant.model_fields[_tag([variant])].annotation)
