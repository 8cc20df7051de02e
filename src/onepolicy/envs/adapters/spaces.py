"""gymnasium's spaces in words: an observation as text, an action out of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST_BOX = 64  # numbers; a larger array is a picture, not a text


class NoText(ValueError):
    """The space has no form in words, or the text is not of the space. The message says what would be."""


def check_observation(space: Any) -> None:
    """NoText if `describe` cannot write its values."""
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            for part in space.spaces:
                check_observation(part)
        case spaces.Dict():
            for part in space.spaces.values():
                check_observation(part)
        case spaces.Box() if np.prod(space.shape) > LARGEST_BOX:
            raise NoText(f"a Box of shape {space.shape}")
        case spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() | spaces.Text():
            pass
        case _:
            raise NoText(f"a {type(space).__name__}")


def describe(space: Any, value: Any) -> str:
    """Numbers in the space's order, parts of a Dict with their names; a Text as it is."""
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            return ", ".join(describe(part, each) for part, each in zip(space.spaces, value, strict=True))
        case spaces.Dict():
            return "; ".join(f"{name}: {describe(part, value[name])}" for name, part in space.spaces.items())
        case spaces.Text():
            return str(value)
        case _:
            return ", ".join(f"{number:.4g}" for number in np.asarray(value).ravel().tolist())


def expected(space: Any, names: Sequence[str]) -> str:
    """What an action is, for the policy. NoText if `parse` cannot read actions of the space."""
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return ", ".join(names) if names else f"a number from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() if np.prod(space.shape) <= LARGEST_BOX:
            return f"{np.prod(space.shape)} numbers separated by commas"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case _:
            raise NoText(f"a {type(space).__name__}")


def parse(space: Any, text: str, names: Sequence[str]) -> Any:
    """The action. names: of a Discrete space's actions, in order; its numbers are read too. NoText if it is none."""
    from gymnasium import spaces

    text = text.strip()
    action: Any
    if isinstance(space, spaces.Text):
        action = text
    elif isinstance(space, spaces.Discrete) and text.lower() in names:
        action = space.start + names.index(text.lower())
    else:
        try:
            numbers = [float(part) for part in text.split(",")]
            shaped = np.array(numbers).reshape(space.shape)
            if not isinstance(space, spaces.Box) and not np.array_equal(shaped, np.trunc(shaped)):
                raise ValueError("whole numbers only")
        except (ValueError, OverflowError):
            raise NoText(f"no action {text[:40]!r}; there is {expected(space, names)}") from None
        action = shaped.astype(space.dtype)[()] if np.isfinite(shaped).all() else None
    if action is None or not space.contains(action):
        raise NoText(f"no action {text[:40]!r}; there is {expected(space, names)}")
    return action
