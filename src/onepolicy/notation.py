"""Measured numbers as text, the same on every page and on every line of the terminal."""

from __future__ import annotations

import math

DASH = "\N{EN DASH}"
"""The text in the place of a value that there is not."""


def number(value: float | None, *, share: bool = False) -> str:
    """Return a value with three significant digits: 0.0123, 1.76e-3, 12,300; DASH if none.

    With `share` a value of 1 is 100%.
    """
    if value is None or math.isnan(value):
        return DASH
    if share:
        percent = 100 * value
        if 0 < abs(percent) < 0.01:
            return "<0.01%"
        return f"{percent:.3g}%"
    size = abs(value)
    if value == 0 or 1e-2 <= size < 999.5:
        return f"{value:.3g}"
    if 999.5 <= size < 1e5:
        return f"{value:,.0f}"
    if math.isinf(value):
        return f"{value}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def with_error(value: float, error: float) -> str:
    """Return a value and its standard error to the same place, the error with two digits.

    Both are in one notation: 1.0500 +- 0.0020, (1.760 +- 0.046)e-3. Without an error that is a
    number above 0 there is the value alone.
    """
    if not math.isfinite(value) or not math.isfinite(error) or error <= 0:
        return number(value)
    size, exponent = max(abs(value), error), 0
    if not 1e-2 <= size < 1e5:
        exponent = math.floor(math.log10(size))
    value, error = value / 10**exponent, error / 10**exponent
    decimals = min(9, max(0, 1 - math.floor(math.log10(error))))
    text = f"{value:,.{decimals}f} +- {error:,.{decimals}f}"
    if exponent:
        return f"({text})e{exponent}"
    return text


def counted(count: int, noun: str) -> str:
    """Return a number of things: 1 step, 12,300 steps, 2 batches."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("ch"):
        noun += "e"
    return f"{count:,} {noun}s"
