"""What the numbers of gymnasium's toy_text environments mean: names of actions, observations in words, rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COMPASS = ("south", "north", "east", "west")
PLACES = ("R", "G", "Y", "B")


@dataclass(frozen=True, slots=True)
class Known:
    actions: tuple[str, ...]
    rules: str
    describe: Callable[[Any, Any], str]  # of (the environment without its wrappers, an observation)


def _cell(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.desc.shape[1])
    return f"row {row}, column {column}"


def _cliff(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.shape[1])
    return f"row {row}, column {column}"


def _taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    where = "in the taxi" if passenger == len(PLACES) else f"at {PLACES[passenger]}"
    return f"taxi at row {row}, column {column}; passenger {where}; destination {PLACES[destination]}"


def _blackjack(env: Any, hand: Any) -> str:
    total, shown, ace = (int(part) for part in hand)
    return f"your sum {total}{' with a usable ace' if ace else ''}; the dealer shows {shown}"


LAKE = Known(
    ("left", "down", "right", "up"),
    "Walk over the frozen lake from the start S to the goal G. F is ice; a hole H ends the walk. Rows count from the "
    "top, columns from the left, both from 0.",
    _cell,
)
CLIFF = Known(
    ("up", "right", "down", "left"),
    "Walk over a grid of 4 rows and 12 columns from row 3, column 0 to row 3, column 11 in few steps. The cells of "
    "row 3 between them are a cliff: stepping there costs 100 and leads back to the start.",
    _cliff,
)
KNOWN = {
    "FrozenLakeEnv": LAKE,
    "CliffWalkingEnv": CLIFF,
    "TaxiEnv": Known(
        (*COMPASS, "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up, drive to their destination and drop them off, in few steps. "
        "The grid has 5 rows and 5 columns. R is at row 0, column 0; G at row 0, column 4; Y at row 4, column 0; B at "
        "row 4, column 3. Walls stand between some columns.",
        _taxi,
    ),
    "BlackjackEnv": Known(
        ("stick", "hit"),
        "Play a hand of blackjack against the dealer: hit for another card, stick to end. The higher sum wins, more "
        "than 21 loses.",
        _blackjack,
    ),
}


def known(env: Any) -> Known | None:
    """By the class of the environment without its wrappers."""
    return KNOWN.get(type(env.unwrapped).__name__)
