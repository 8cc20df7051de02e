"""The rule for values that are not finite: NaN, infinite, or null in a file.

A token inside the mask with such a value is left out and counted ("skip"), or it is an error
("raise"). Values outside the mask never matter. Functions, audits and the command line share the
rule, the count and its sentence, and those for a log-probability above 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from onepolicy.errors import UsageError

if TYPE_CHECKING:  # the command line reads the choices without torch
    from torch import Tensor

Nonfinite = Literal["skip", "raise"]
KINDS = "NaN, infinite or null"
ABOVE_ZERO = 1e-3
"""Log-probabilities may be above 0 by this much, from rounding."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tokens that are left out because a value of theirs is not finite. `str()` says it."""

    tokens: int = 0  # inside the mask, with those that are left out
    columns: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the first column whose value is not finite. Columns without any are not listed."""

    @property
    def count(self) -> int:
        """Number of tokens left out."""
        return sum(self.columns.values())

    def share(self, *columns: str) -> float:
        """Return the share of tokens left out because of these columns."""
        return sum(self.columns.get(name, 0) for name in columns) / max(1, self.tokens)

    def __add__(self, other: LeftOut) -> LeftOut:
        names = [*self.columns, *(name for name in other.columns if name not in self.columns)]
        counts = {name: self.columns.get(name, 0) + other.columns.get(name, 0) for name in names}
        return LeftOut(self.tokens + other.tokens, counts)

    def __str__(self) -> str:
        if not self.count:
            return f"None of {self.tokens:,} tokens has a value that is {KINDS}"
        places = ", ".join(f"{name} {count:,}" for name, count in self.columns.items())
        return (
            f"{self.count:,} of {self.tokens:,} tokens are left out: a value is {KINDS} ({places})"
        )


def leave_out(mask: Tensor, values: Mapping[str, Tensor | None]) -> tuple[Tensor, LeftOut]:
    """Return the mask [T] bool of the tokens whose values are all finite, and the others' count.

    mask: [T] bool. values: [T] each, by name; the two sides' log-probabilities come first.
    """
    kept, counts = mask, [mask.sum()]
    names = [name for name, value in values.items() if value is not None]
    for name in names:
        value = values[name]
        assert value is not None
        kept = kept & value.isfinite()
        counts.append(kept.sum())
    tokens, *left = (int(count) for count in counts)
    before = [tokens, *left]
    columns = {
        name: before[i] - before[i + 1] for i, name in enumerate(names) if before[i] > before[i + 1]
    }
    return kept, LeftOut(tokens, columns)


def apply_rule(
    caller: str,
    nonfinite: Nonfinite,
    mask: Tensor,  # [T] bool
    values: Mapping[str, Tensor | None],  # [T] each
    *,
    place: Callable[[int], object] = lambda slot: f"slot {slot}",
) -> tuple[Tensor, LeftOut]:
    """Return `leave_out` of the mask, for the function `caller` with the argument `nonfinite`.

    place: describes a slot. Raises UsageError if the argument is neither "skip" nor "raise", and
    for the first value that is not finite if it is "raise".
    """
    if nonfinite not in get_args(Nonfinite):
        expected = " or ".join(map(repr, get_args(Nonfinite)))
        raise UsageError(f"{caller}: nonfinite is {nonfinite!r}, expected {expected}")
    kept, left = leave_out(mask, values)
    if nonfinite == "raise" and left.count:
        name = next(iter(left.columns))
        value = values[name]
        assert value is not None
        slot = int((mask & ~value.isfinite()).nonzero()[0, 0])
        raise UsageError(
            f"{caller}: {name} is not finite on {left.columns[name]} of {left.tokens} masked-in "
            f"slots, first {place(slot)}: {value[slot].item()}; clear the mask there, fix the "
            "engine that returned it, or pass nonfinite='skip'"
        )
    return kept, left


CLEARLY_ABOVE_ZERO = 0.1
"""A value this far above 0 is no rounding of a log-probability, whatever the others are."""

FEWEST_JUDGED = 8
"""Values of a side from which none below 0 is a fault: a few may be rounding."""


def refuse_probabilities(
    caller: str,
    mask: Tensor,  # [T] bool
    values: Mapping[str, Tensor],  # [T] each: log-probabilities of both sides
    *,
    place: Callable[[int], object] = lambda slot: f"slot {slot}",
) -> None:
    """Raise UsageError for the first masked-in value of a side that is no log-probability.

    It is above CLEARLY_ABOVE_ZERO, or above ABOVE_ZERO on a side of FEWEST_JUDGED values or more of
    which none is below 0. Values that are not finite are not judged, nor is a log-ratio: a side
    beside one that is 0 in every slot of the mask.
    """
    values = {name: value.detach() for name, value in values.items()}
    ratio = sum(~(mask & (value != 0)).any() for value in values.values())
    wrong = {name: no_logarithms(mask, value) & (ratio == 0) for name, value in values.items()}
    if not sum(each.any() for each in wrong.values()):  # a GPU is waited for once
        return
    name = next(name for name, each in wrong.items() if each.any())
    value, slot = values[name], int(wrong[name].nonzero()[0, 0])
    judged = value[mask & value.isfinite()]
    reason = above_zero(float(judged.min()), float(judged.max()))
    raise UsageError(f"{caller}: {name} {place(slot)} is {value[slot].item():g}: {reason}")


def no_logarithms(mask: Tensor, value: Tensor) -> Tensor:
    """Return [T] bool: the values of a side, in the mask, that are no log-probabilities."""
    judged = mask & value.isfinite()
    none_below = ~(judged & (value < 0)).any() & (judged.sum() >= FEWEST_JUDGED)
    return judged & ((value > CLEARLY_ABOVE_ZERO) | (none_below & (value > ABOVE_ZERO)))


def above_zero(lowest: float, highest: float) -> str:
    """Return the fault of log-probabilities that reach from `lowest` to `highest` above 0."""
    if lowest >= 0 and highest <= 1 + ABOVE_ZERO:
        return (
            "all values are between 0 and 1: probabilities instead of their logarithms? "
            "Take the logarithm"
        )
    fault = "a log-probability is never above 0; "
    if lowest >= 0:
        return fault + "negative log-likelihoods? Negate them"
    return fault + "mend what returned it, or clear the mask there"
