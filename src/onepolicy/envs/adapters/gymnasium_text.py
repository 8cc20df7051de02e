"""Observations and actions of gymnasium as text. toy_text.toml has the words of toy_text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

MOST_NUMBERS = 64
"""Numbers of an array that is written out. A larger array is a picture and not a text."""
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[(?:\d;)?[34]([0-7])(?:;\d)?m(.*?)\x1b\[0m", re.DOTALL)


class TextFormError(ValueError):
    """The error of a value or space without a text form, or of a text that is no action."""


@dataclass
class ActTool:
    """The tool that takes one step."""

    description: str
    name: str = "act"
    argument: str = "action"


@cache
def toy_text() -> dict[str, Any]:
    """Return the rows of toy_text.toml."""
    text = files("onepolicy.envs.adapters").joinpath("toy_text.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def describe_toy(env: Any, observation: Any, toy: dict[str, Any]) -> str:
    """Return an observation of toy_text in words. env: without its wrappers."""
    if isinstance(observation, tuple):
        parts = tuple(map(int, observation))
    elif hasattr(env, "decode"):
        parts = tuple(env.decode(int(observation)))
    else:  # a cell of a grid
        _, columns = getattr(env, "shape", None) or env.desc.shape
        parts = divmod(int(observation), columns)
    words = toy.get("words", {})
    shown = [words[str(at)][part] if str(at) in words else part for at, part in enumerate(parts)]
    return str(toy["observation"]).format(*shown)


def describe_value(value: Any) -> str:
    """Return an observation as text: numbers in order, parts with their names, text as it is.

    Raises TextFormError if it has no such form.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "; ".join(f"{name}: {describe_value(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(describe_value, value))
    array = np.asarray(value)
    if array.size > MOST_NUMBERS or array.dtype.kind not in "biuf":
        raise TextFormError(f"an observation of shape {array.shape}")
    digits = ".4g" if array.dtype.kind == "f" else "d"
    return ", ".join(format(number, digits) for number in array.ravel().tolist())


def describe_ansi(screen: str) -> str:
    """Return terminal text without control codes; a coloured part becomes `[red:S]`."""
    named = COLOURED.sub(lambda found: f"[{COLOURS[int(found[1])]}:{found[2]}]", screen)
    return re.sub(r"\x1b\[[\d;]*m", "", named).strip("\n")


def describe_actions(space: Any, names: Sequence[str]) -> str:
    """Return the space's actions in words. Raises TextFormError if they are no numbers or text."""
    from gymnasium import spaces

    if names:
        return ", ".join(names)
    if isinstance(space, spaces.Discrete):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    if space.shape is None or np.prod(space.shape) > MOST_NUMBERS:
        raise TextFormError(f"a {type(space).__name__}")
    return f"{np.prod(space.shape)} numbers separated by commas"


def parse_action(space: Any, text: str, names: Sequence[str]) -> Any:
    """Return the action that a text stands for. Raises TextFormError if there is none.

    names: the actions of a Discrete space, in order. Their numbers are accepted too.
    """
    text = text.strip()
    if text.lower() in names:
        return space.start + names.index(text.lower())
    action: Any = text
    if space.dtype.kind != "U":
        action = _parse_numbers(space, text)
    if action is None or not space.contains(action):
        raise TextFormError(f"no action {text[:40]!r}; there is {describe_actions(space, names)}")
    return action


def _parse_numbers(space: Any, text: str) -> Any:
    """Return the array of comma-separated numbers in the space's shape and dtype, or None."""
    try:
        numbers = np.array([float(part) for part in text.split(",")]).reshape(space.shape)
    except (ValueError, OverflowError):
        return None
    if not np.isfinite(numbers).all():
        return None
    with np.errstate(invalid="ignore"):
        action = numbers.astype(space.dtype)
    # A number that is not whole would be cut, one that is too large wraps around.
    if space.dtype.kind != "f" and not np.array_equal(action, numbers):
        return None
    return action[()]
